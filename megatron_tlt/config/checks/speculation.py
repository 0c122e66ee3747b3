"""Cross-checks of speculative decoding: drafter, bandit, and training the drafter in idle time."""

from __future__ import annotations

from itertools import pairwise

from megatron_tlt.config.checks.layout import Device
from megatron_tlt.config.drafter_kinds import DRAFTERS, SETTINGS, TRAINED_ONLY
from megatron_tlt.config.idle import IdleSection
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.root import Config
from megatron_tlt.config.speculation import BanditSection, SpeculationSection, SuffixSection
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
    """Warnings of settings of a trained drafter where there is none, and of another drafter or selector.

    Suffix beside a `drafter_path` was a choice, and `none` beside settings of selectors turns drafts off.
    """
    at = "rollout.speculation"
    found: list[str] = []
    if section.trained is None:
        given = {name: getattr(section, name) for name in TRAINED_ONLY}
        if section.drafter == "suffix":
            given.pop("drafter_path")
        why = f"has no effect with {at}.drafter = {section.drafter}"
        found += [f"{at}.{name} = {value} {why}" for name, value in given.items() if value is not None]
    if section.drafter == "none":
        return found
    if section.selector != "beg_mab" and section.bandit != BanditSection():
        found.append(f"{at}.bandit has no effect with {at}.selector = {section.selector}; beg_mab reads it")
    if section.drafter != "suffix" and section.suffix != SuffixSection():
        found.append(f"{at}.suffix has no effect with {at}.drafter = {section.drafter}")
    return found


def idle_warnings(config: Config, device: Device | None, num_ranks: int | None) -> list[str]:
    """Warnings of settings of idle ranks that nothing reads. `num_ranks`: None if that is not known."""
    if not config.trains:
        return []
    idle, default = config.idle, IdleSection()
    unread: dict[str, str] = {}
    if not idle.train_drafter:
        unread["min_steps_per_window"] = "idle.train_drafter = false"
    if idle.pre_rollout is False:
        unread["pre_rollout_mib"] = "idle.pre_rollout = false"
    if not idle.train_drafter and idle.pre_rollout is False:
        unread["min_tail_seconds"] = "idle.train_drafter = false and idle.pre_rollout = false"
    given = {name: getattr(idle, name) for name in unread if getattr(idle, name) != getattr(default, name)}
    found = [f"idle.{name} = {value} has no effect with {unread[name]}" for name, value in given.items()]
    if num_ranks is None or num_ranks // config.rollout.tp != 1:
        return found
    alone = "has no effect with one rollout replica, which never waits"
    if idle.train_drafter and _never_trains(config, num_ranks, device):
        remedy = "idle.min_steps_per_window above 0 trains it, false gives the memory of its training to the KV cache"
        found.append(f"idle.train_drafter = true {alone}: the drafter stays as it is; {remedy}")
    if idle.pre_rollout is True:
        found.append(f"idle.pre_rollout = true {alone}, but on evaluations, which verify the last one's responses")
    return found


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
    elif _never_trains(config, num_ranks, device) and section.drafter_path is None:
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


def _never_trains(config: Config, num_ranks: int, device: Device | None) -> bool:
    """Whether there is no idle time (one replica), no configured micro-step, and no wait for environments in which the
    memory of training is free either.
    """
    if num_ranks // config.rollout.tp != 1 or config.idle.min_steps_per_window:
        return False
    return config.env is None or config.rollout.releases_cache(device or "cpu")
