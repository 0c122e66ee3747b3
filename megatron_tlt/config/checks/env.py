"""Cross-checks of multi-turn rollouts."""

from __future__ import annotations

from megatron_tlt.config.root import Config
from megatron_tlt.errors import ConfigProblem, Problems
from megatron_tlt.interfaces import CAPABILITIES


def check_env(config: Config) -> Problems:
    """One environment is named, the engine has turns, and a turn with its observation fits into a response."""
    section = config.env
    if section is None:
        return
    if (section.kind is None) == (section.path is None):
        yield ConfigProblem("env.kind", section.kind, "either env.kind or env.path is required")
    if section.path is not None and not all(section.path.rpartition(":")[::2]):
        yield ConfigProblem("env.path", section.path, "must be package.module:Class or path/to/file.py:Class")
    backend = config.rollout.backend
    if not CAPABILITIES[backend].turns:
        able = " or ".join(repr(name) for name, can in CAPABILITIES.items() if can.turns)
        yield ConfigProblem("rollout.backend", backend, f"must be an engine with several turns, with env: {able}")
    limits = {"rollout": config.rollout.max_tokens}
    if config.data.eval is not None and config.eval.max_tokens is not None:
        limits["eval"] = config.eval.max_tokens
    for name, limit in limits.items():
        if section.max_turns > 1 and section.max_observation_tokens >= limit:
            allowed = f"must be < {name}.max_tokens ({limit}), which counts observations too"
            yield ConfigProblem("env.max_observation_tokens", section.max_observation_tokens, allowed)
    if section.max_turn_tokens is not None and section.max_turn_tokens > config.rollout.max_tokens:
        allowed = f"must be <= rollout.max_tokens ({config.rollout.max_tokens})"
        yield ConfigProblem("env.max_turn_tokens", section.max_turn_tokens, allowed)
