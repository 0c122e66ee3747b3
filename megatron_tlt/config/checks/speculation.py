"""Cross-checks of speculative decoding: drafter, bandit, and training the drafter in idle time."""

from __future__ import annotations

from itertools import pairwise

from megatron_tlt.config.checks.layout import Device
from megatron_tlt.config.drafter_kinds import DRAFTERS, SETTINGS, TRAINED_ONLY
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.root import Config
from megatron_tlt.config.speculation import BanditSection, SpeculationSection
from megatron_tlt.errors import ConfigProblem, Problems
from megatron_tlt.interfaces import CAPABILITIES


def check_speculation(section: SpeculationSection, has_drafter: bool = False) -> Problems:
    """A trained drafter without weights, and a bandit whose arms or buckets are no choice.

    `has_drafter`: the weights come from elsewhere than `drafter_path`.
    """
    at = "rollout.speculation"
    if section.trained and section.drafter_path is None and not has_drafter:
        allowed = f"drafter {section.drafter!r} needs a directory made by megatron-tlt drafter"
        yield ConfigProblem(f"{at}.drafter_path", None, allowed)
    if section.selector == "beg_mab" and section.drafter != "none":
        yield from _check_bandit(section.bandit)
        largest = max(section.bandit.arms, default=0)
        # The default is not refused: a configuration that was written out has it, too.
        if section.draft_len != SpeculationSection().draft_len and section.draft_len < largest:
            allowed = f"must be >= {largest}, the largest of {at}.bandit.arms, which selector: beg_mab drafts instead"
            yield ConfigProblem(f"{at}.draft_len", section.draft_len, allowed)


def _check_bandit(bandit: BanditSection) -> Problems:
    at = "rollout.speculation.bandit"
    if not bandit.arms or len(set(bandit.arms)) < len(bandit.arms):
        yield ConfigProblem(f"{at}.arms", list(bandit.arms), "must be one arm at least, none twice")
    if not bandit.thresholds or any(b <= a for a, b in pairwise(bandit.thresholds)):
        yield ConfigProblem(f"{at}.thresholds", list(bandit.thresholds), "must rise")


def unread_settings(section: SpeculationSection) -> list[str]:
    """Warnings of settings of a trained drafter where there is none; suffix beside a `drafter_path` was a choice."""
    if section.trained is not None:
        return []
    at, given = "rollout.speculation", {name: getattr(section, name) for name in TRAINED_ONLY}
    if section.drafter == "suffix":
        given.pop("drafter_path")
    why = f"has no effect with {at}.drafter = {section.drafter}"
    return [f"{at}.{name} = {value} {why}" for name, value in given.items() if value is not None]


def unread_steps_warning(config: Config) -> str | None:
    """The warning of micro-steps of a drafter that is not trained; None without any."""
    steps = config.idle.min_steps_per_window
    if not steps or config.idle.train_drafter or not config.trains:
        return None
    return f"idle.min_steps_per_window = {steps} has no effect with idle.train_drafter = false"


def check_idle(config: Config, shape: ArchitectureConfig | None, num_ranks: int, device: Device | None) -> Problems:
    """Training the drafter needs a trainable drafter, at least two replicas, and room for hidden states."""
    yield from _check_kind(config)
    if not config.idle.train_drafter:
        return
    section, online = config.rollout.speculation, config.drafter.online
    if section.trained is None:
        kinds = " or ".join(map(repr, DRAFTERS))
        allowed = f"needs rollout.speculation.drafter {kinds}: {section.drafter!r} has nothing to train"
        yield ConfigProblem("idle.train_drafter", True, allowed)
    elif _never_trains(config, num_ranks) and section.drafter_path is None:
        allowed = (
            "is required with one rollout replica: it has no idle time, so random weights would stay random (or "
            "idle.min_steps_per_window above 0, or rollout.speculation.drafter=suffix or none with "
            "idle.train_drafter=false)"
        )
        yield ConfigProblem("rollout.speculation.drafter_path", None, allowed)
    yield from _check_hidden_states(config)
    if online.fp8 == "te" and device == "cpu":
        yield ConfigProblem("drafter.online.fp8", online.fp8, "must be 'off' on CPU")
    if shape is not None:
        size = section.state_parts * shape.hidden_size * (4 if config.rollout.dtype == "fp32" else 2) + 8
        sizes = config.drafter.sizes(device or "cpu")
        needed = min(config.drafter.max_sequence_tokens, sizes.micro_step_tokens) * size / 2**20
        if sizes.buffer_mib < needed:
            allowed = f"must be >= {needed:.2f}, or no long response fits"
            yield ConfigProblem("drafter.online.buffer_mib", sizes.buffer_mib, allowed)


def _check_hidden_states(config: Config) -> Problems:
    """Their source: an engine that has them, or an actor that can give them to the ranks that train."""
    at, chosen = "drafter.online.hidden_states", config.drafter.online.hidden_states
    if config.hidden_states_of == "engine":
        if not CAPABILITIES[config.rollout.backend].hidden_states:
            allowed = f"must be 'actor' or 'auto' with rollout.backend: {config.rollout.backend}, which gives none"
            yield ConfigProblem(at, chosen, allowed)
        return
    if config.rollout.tp > 1:
        allowed = "must be 'engine' with rollout.tp above 1: ranks of one engine train on the same responses"
        yield ConfigProblem(at, chosen, allowed)


def _check_kind(config: Config) -> Problems:
    """Settings that the kind of drafter does not have."""
    section, at = config.rollout.speculation, "rollout.speculation"
    kind = section.trained
    for name in SETTINGS:
        value = getattr(section, name)
        if kind is not None and value is not None and name not in kind.settings:
            kinds = ", ".join(facts.name for facts in DRAFTERS.values() if name in facts.settings)
            allowed = f"must be null with drafter: {kind.name}; a drafter that has it: {kinds}"
            yield ConfigProblem(f"{at}.{name}", value, allowed)


def _never_trains(config: Config, num_ranks: int) -> bool:
    """Whether there is no idle time (one replica) and no configured micro-step either."""
    return num_ranks // config.rollout.tp == 1 and config.idle.min_steps_per_window == 0
