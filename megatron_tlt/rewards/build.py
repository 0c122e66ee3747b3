"""The configured reward functions, loaded."""

from __future__ import annotations

from megatron_tlt.config.data import RewardConfig, RewardSection
from megatron_tlt.rewards.base import NamedScorer, Scorer, labels
from megatron_tlt.rewards.python import PythonReward, load_function


def build_scorers(section: RewardSection) -> list[NamedScorer]:
    """All reward functions of the section, in order. Raises RewardError and ConfigError."""
    named = zip(labels(section), section.functions, strict=True)
    return [NamedScorer(label, config, _build(config)) for label, config in named]


def check_user_functions(section: RewardSection) -> None:
    """Imports users' functions and checks how they can be called. Raises RewardError."""
    for config in section.functions:
        if config.name == "python":
            load_function(config)


def _build(config: RewardConfig) -> Scorer:
    """A factory: imports only what is used, for math-verify and reasoning-gym take about a second each."""
    if config.name == "python":
        return PythonReward(config)
    if config.name == "task":
        from megatron_tlt.rewards.task import TaskReward

        return TaskReward(config)
    if config.name == "math":
        from megatron_tlt.rewards.math import MathReward

        return MathReward(config)
    if config.name == "exact":
        from megatron_tlt.rewards.exact import ExactReward

        return ExactReward(config)
    from megatron_tlt.rewards.format import FormatReward

    return FormatReward(config)
