"""The warning of rewards that are equal for all responses to a prompt: nothing is learned from them. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from megatron_tlt.observe.jsonl import JsonRow

_STEPS = 3  # in a row: fewer happen by chance where few prompts are neither too easy nor too hard
_QUOTED = 160  # characters of a text: its beginning and its end, where an answer stands
_MANY = 0.5  # share of truncated responses from which on it may be why no reward differs
_ALL_EQUAL = ("reward/equal_groups",)
_SIGNS = {
    "distill": (),  # learns from its teacher; its rewards may only measure
    "reinforce_pp": (*_ALL_EQUAL, "update/skipped_share"),  # compares all responses of a step
}
"""Metrics that are 1 in such a step, of the algorithms that do not just compare the responses to one prompt."""


def equal_rewards_warning(
    steps: Sequence[Mapping[str, float | None]], algorithm: str, samples: Sequence[JsonRow]
) -> str | None:
    """The warning after `steps`, metrics of steps in their order, where the last ones had equal rewards; else None.

    `samples`: rows of samples.jsonl, the last of which is quoted.
    """
    signs, last = _SIGNS.get(algorithm, _ALL_EQUAL), steps[-_STEPS:]
    if not signs or len(last) < _STEPS or any(row.get(name) != 1 for row in last for name in signs):
        return None
    text = f"all responses to a prompt had equal rewards in the last {_STEPS} steps, so no reward taught anything."
    if last[-1].get("reward/kl") is not None:
        text += " The advantages are of the KL in the reward alone (algorithm.kl_in)."
    if (truncated := last[-1].get("length/truncated") or 0.0) >= _MANY:
        limits = "rollout.max_tokens, or a limit of their environment"
        text += f" {truncated:.0%} of the responses were truncated ({limits})."
    for sample in samples[-1:]:
        names = ("prompt", "answer", "response")
        quoted = ", ".join(f"{name} {_short(sample.get(name))}" for name in names)
        text += f" One of them: {quoted}, reward {sample.get('reward')}."
    return f"{text} Where such rewards are right, these prompts are too easy or too hard for the policy"


def _short(value: object) -> str:
    """A quoted text, in one line; null stays null."""
    if not isinstance(value, str):
        return "null" if value is None else str(value)
    half = _QUOTED // 2
    return repr(value if len(value) <= _QUOTED else f"{value[:half]} ... {value[-half:]}")


class EqualRewards:
    """Checks the metrics of each step of a run. The warning comes again only after a step without equal rewards."""

    def __init__(self, algorithm: str):
        self._algorithm, self._is_known = algorithm, False
        self._last: deque[Mapping[str, float]] = deque(maxlen=_STEPS)

    def check(self, row: Mapping[str, float], samples: Callable[[], Sequence[JsonRow]]) -> str | None:
        """The warning if it is new after a step with the metrics `row`; `samples` gives rows of samples.jsonl of it."""
        self._last.append(row)
        was_known, steps = self._is_known, tuple(self._last)
        self._is_known = equal_rewards_warning(steps, self._algorithm, ()) is not None
        return None if was_known or not self._is_known else equal_rewards_warning(steps, self._algorithm, samples())
