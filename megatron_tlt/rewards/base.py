"""From the configured reward functions to one result a sample."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_tlt.config.data import RewardConfig, RewardSection
from megatron_tlt.errors import LONGEST_FAILURE, error_line
from megatron_tlt.types import Prompt, RewardResult, Sample
from megatron_tlt.workers.answers import as_number, last_match

_LARGEST = 1e100  # in size, of a sample's reward: algorithms sum squares of rewards in float64

# The value of one reward function for one sample. May raise: `judge` records it.
Scorer = Callable[[Prompt, Sample], object]


@dataclass(frozen=True)
class NamedScorer:
    """A reward function with its place in the configuration."""

    label: str  # key in RewardResult.parts
    config: RewardConfig
    scorer: Scorer


def judge(scorers: Sequence[NamedScorer], failure_value: float, prompt: Prompt, sample: Sample) -> RewardResult:
    """The weighted sum of all functions; correct means that every function that counts reaches its threshold.

    Never raises for an error of a reward function: the sample's value is then `failure_value`, it is not
    correct, and `failure` names the function and its error. A trajectory whose environment failed is not
    judged. Mutates nothing.
    """
    if sample.failure is not None:
        return failed(f"env: {sample.failure}", failure_value)
    parts: dict[str, float] = {}
    correct, counting = True, False
    for named in scorers:
        try:
            value = as_number(named.scorer(prompt, sample), "returned")
        # A user's function may raise anything, even call sys.exit: the sample gets a recorded failure.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            return failed(f"{named.label}: {error_line(error)}", failure_value, parts)
        parts[named.label] = value
        if (least := named.config.least) is not None:
            counting = True
            correct = correct and value >= least
    total = float(sum(named.config.weight * parts[named.label] for named in scorers))
    if not abs(total) <= _LARGEST:  # nor NaN
        why = f"the weighted sum of {parts} is {total}: must be at most {_LARGEST:g} in size"
        return failed(why, failure_value, parts)
    return RewardResult(total, correct and counting, parts)


def correct_line(section: RewardSection) -> str:
    """The functions that a correct response needs and their thresholds, where these are several; else empty."""
    named = enumerate(zip(labels(section), section.functions, strict=True))
    counting = [(place, label, config.least) for place, (label, config) in named if config.least is not None]
    if len(counting) < 2:
        return ""
    each = ", ".join(f"{label} at least {least:g} (rewards.functions.{place})" for place, label, least in counting)
    return f"Correct, in accuracy and pass@k, is a response with all of: {each}; threshold: null takes one out"


def failed(why: str, failure_value: float, parts: dict[str, float] | None = None) -> RewardResult:
    """The result of a sample whose reward could not be computed."""
    return RewardResult(failure_value, False, dict(parts or {}), why[:LONGEST_FAILURE])


def compile_pattern(pattern: str | None) -> re.Pattern[str] | None:
    """The pattern with `.` matching line ends too: answers span lines."""
    return None if pattern is None else re.compile(pattern, re.DOTALL)


def extract_answer(pattern: re.Pattern[str] | None, text: str) -> str | None:
    """Group 1 of the last match, stripped; without a pattern the whole text, stripped. None if nothing matches."""
    return text.strip() if pattern is None else last_match(pattern, text)


def references_of(prompt: Prompt) -> tuple[str, ...]:
    """The prompt's acceptable answers that have text: an empty one would be an empty response's. Raises ValueError
    without one.
    """
    references = tuple(answer for answer in prompt.answers if answer.strip())
    if not references:
        raise ValueError(f"prompt {prompt.dataset_id!r} has no reference answer")
    return references


def labels(section: RewardSection) -> list[str]:
    """A unique name for every function: its kind, or the user's function; repeated ones are numbered."""
    names: list[str] = []
    for config in section.functions:
        name = config.path.rpartition(":")[2] if config.name == "python" and config.path else config.name
        taken = sum(n == name or n.startswith(f"{name}#") for n in names)
        names.append(f"{name}#{taken + 1}" if taken else name)
    return names
