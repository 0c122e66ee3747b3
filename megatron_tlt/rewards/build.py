"""The configured reward functions, loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_tlt.config.data import RewardConfig, RewardSection
from megatron_tlt.errors import ConfigProblem, RewardError
from megatron_tlt.rewards.base import NamedScorer, Scorer, labels
from megatron_tlt.rewards.env import env_reward
from megatron_tlt.rewards.python import load_function, python_reward
from megatron_tlt.rewards.spelling import is_comparable
from megatron_tlt.rewards.text import exact_reward, format_reward
from megatron_tlt.types import Answer


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


def answer_problems(
    section: RewardSection, field: str, answers: Iterable[tuple[str, Answer | None]]
) -> list[ConfigProblem]:
    """Reward functions that compare with reference answers, where no row of the source of section `field` has one."""
    if not section.needs_answers or any(answer not in (None, ()) for _, answer in answers):
        return []
    allowed = f"needs reference answers, and the rows of {field} have none: every response would be a recorded failure"
    found = [(i, function.name) for i, function in enumerate(section.functions) if function.needs_answer]
    return [ConfigProblem(f"rewards.functions.{i}.name", name, allowed) for i, name in found]


def answer_warning(section: RewardSection, answers: Sequence[tuple[str, Answer | None]]) -> str | None:
    """A warning of reference answers, each with its file and row, that a reward function cannot compare with."""
    for label, config in zip(labels(section), section.functions, strict=True):
        if config.needs_answer:
            bad = [(where, answer) for where, answer in answers if not _is_usable(config.name, answer)]
            if bad:
                where, answer = bad[0]
                what = "no answer" if answer is None else f"the answer {answer!r:.80}"
                return (f"{where}: reward {label!r} has nothing to compare with, for there is {what}; every response "
                        f"to such a row is a recorded failure ({len(bad)} row(s))")  # fmt: skip
    return None


def _is_usable(name: str, answer: Answer | None) -> bool:
    if answer is None:
        return False
    acceptable = (answer,) if isinstance(answer, str) else answer
    return any(map(is_comparable if name == "math" else str.strip, acceptable))


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
