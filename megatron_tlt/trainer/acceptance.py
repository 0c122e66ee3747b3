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
        self._steps: deque[dict[str, float]] = deque(maxlen=_STEPS)
        self._active: set[str] = set()

    def check(self, row: Mapping[str, float]) -> list[str]:
        """New warnings after a step with `engine/spec_*` counters in `row`. Mutates the last steps' counters."""
        names = ("row_steps", "drafted_tokens", "emitted_tokens")
        if not row["engine/spec_drafted_tokens"]:
            return []
        self._steps.append({name: row[f"engine/spec_{name}"] for name in names})
        total = {name: sum(step[name] for step in self._steps) for name in names}
        if len(self._steps) < _STEPS or total["drafted_tokens"] < _LEAST_TOKENS:
            return []
        accepted = total["emitted_tokens"] - total["row_steps"]
        found = {
            _NOTHING: accepted == 0,
            _EVERYTHING: accepted == total["drafted_tokens"],
        }
        now = {text for text, holds in found.items() if holds}
        new, self._active = now - self._active, now
        return [text.format(steps=_STEPS) for text in sorted(new)]
