"""Pre-rollouts and the drafts of evaluations: where they run, and why not elsewhere."""

from __future__ import annotations

from megatron_tlt.config.root import Config
from megatron_tlt.errors import ConfigProblem, Problems
from megatron_tlt.interfaces import CAPABILITIES

NO_EVALUATIONS = "the run has no evaluations"
_REPEATS_BITS = "rollout.schedule: static, which repeats a run bit by bit as long as nothing drafts"


def check_pre_rollouts(config: Config) -> Problems:
    """`idle.pre_rollout: true` where they cannot run."""
    if config.idle.pre_rollout is True and (reason := why_pre_rollouts_cannot_run(config)) is not None:
        yield ConfigProblem("idle.pre_rollout", True, f"must be 'auto' or false with {reason}")


def why_no_pre_rollouts(config: Config, num_ranks: int) -> str | None:
    """Why idle replicas of a run on `num_ranks` ranks pre-roll nothing; None: they do."""
    if config.idle.pre_rollout is False:
        return "idle.pre_rollout: false"
    if num_ranks // config.rollout.tp < 2:
        return "one rollout replica, which never waits"
    if config.idle.pre_rollout == "auto" and _repeats_bits(config):
        return _REPEATS_BITS
    return why_pre_rollouts_cannot_run(config)


def why_no_eval_drafts(config: Config) -> str | None:
    """Why an evaluation does not draft with the responses of the last one; None: it does."""
    if config.data.eval is None or not config.eval.every:
        return NO_EVALUATIONS
    if config.idle.pre_rollout is False:
        return "idle.pre_rollout: false"
    return _REPEATS_BITS if _repeats_bits(config) else _takes_no_drafts(config)


def takes_drafts(config: Config, num_ranks: int) -> bool:
    """Whether the engine gets responses of an earlier policy to verify."""
    return why_no_pre_rollouts(config, num_ranks) is None or why_no_eval_drafts(config) is None


def _repeats_bits(config: Config) -> bool:
    """Whether drafts would be the only thing that makes the bits of the PyTorch decoder depend on time."""
    rollout = config.rollout
    return (rollout.schedule, rollout.numerics, rollout.speculation.drafter) == ("static", "default", "none")


def why_pre_rollouts_cannot_run(config: Config) -> str | None:
    """The setting with which they cannot run, whatever `idle.pre_rollout` says; None: they can."""
    if (reason := _takes_no_drafts(config)) is not None:
        return reason
    if config.actor.router_replay == "rollout":
        return "actor.router_replay: rollout"
    return None


def _takes_no_drafts(config: Config) -> str | None:
    """The engine that verifies no drafts of a call."""
    backend = config.rollout.backend
    if CAPABILITIES[backend].pre_rollouts:
        return None
    return f"rollout.backend: {backend}, which verifies no drafts that it is given"
