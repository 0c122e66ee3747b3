"""The configured reward functions, loaded."""

from __future__ import annotations

from megatron_tlt.config.data import RewardConfig, RewardSection
from megatron_tlt.errors import ConfigProblem, RewardError
from megatron_tlt.rewards.base import NamedScorer, Scorer, labels
from megatron_tlt.rewards.env import env_reward
from megatron_tlt.rewards.python import load_function, python_reward
from megatron_tlt.rewards.text import exact_reward, format_reward


def build_scorers(section: RewardSection) -> list[NamedScorer]:
    """All reward functions of the section, in order. Raises RewardError and ConfigError."""
    named = zip(labels(section), section.functions, strict=True)
    return [NamedScorer(label, config, _build(config)) for label, config in named]


def function_problems(section: RewardSection) -> list[ConfigProblem]:
    """Users' functions that cannot be imported or called. Imports them."""
    problems = []
    for index, config in enumerate(section.functions):
        try:
            if config.name == "python" and config.path is not None and ":" in config.path:  # else: config/checks
                load_function(config)
        except RewardError as error:
            problems.append(ConfigProblem(f"rewards.functions.{index}.path", config.path, str(error)))
    return problems


def _build(config: RewardConfig) -> Scorer:
    """Imports only what is used: math-verify and reasoning-gym take about a second each."""
    if config.name == "python":
        return python_reward(config)
    if config.name == "task":
        from megatron_tlt.rewards.task import task_reward

        return task_reward(config)
    if config.name == "math":
        from megatron_tlt.rewards.math import math_reward

        return math_reward(config)
    if config.name == "env":
        return env_reward(config)
    return exact_reward(config) if config.name == "exact" else format_reward(config)
