"""Warnings about acceptance that no working drafter has: the commonest bugs of speculation, which no response shows.

Drafts never change a response, so a broken drafter only makes rollouts slower, silently.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

_STEPS = 5  # RL steps whose counters are added up
_LEAST_TOKENS = 1000  # drafted tokens in these steps below which nothing is concluded

_NOTHING = (
    "no drafted token of the last {steps} steps was accepted: the drafter is one of another policy, or reads other "
    "hidden states than it was trained on"
)
_EVERYTHING = (
    "every drafted token of the last {steps} steps was accepted: no drafter is always right; "
    "are drafts verified at all?"
)


class AcceptanceMonitor:
    """Checks the counters of each step, summed over ranks. A warning comes again only after a step without it."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=_STEPS)  # drafted and accepted tokens
        self._active: set[str] = set()

    def check(self, row: Mapping[str, float]) -> list[str]:
        """New warnings after a step with `engine/spec_*` counters in `row`. Mutates the last steps' counters.

        Pre-rolled drafts are left out: they are none of a drafter's, and all right while the policy stands still.
        """
        drafted = row["engine/spec_drafted_tokens"] - row.get("engine/spec_pre_rolled_drafted", 0.0)
        if not drafted:
            return []
        accepted = row["engine/spec_accepted_tokens"] - row.get("engine/spec_pre_rolled_accepted", 0.0)
        self._steps.append((drafted, accepted))
        drafted, accepted = (sum(of_steps) for of_steps in zip(*self._steps, strict=True))
        if len(self._steps) < _STEPS or drafted < _LEAST_TOKENS:
            return []
        found = {_NOTHING: accepted == 0, _EVERYTHING: accepted == drafted}
        now = {text for text, holds in found.items() if holds}
        new, self._active = now - self._active, now
        return [text.format(steps=_STEPS) for text in sorted(new)]
