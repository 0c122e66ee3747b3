"""Dynamic sampling: the groups that a step keeps (DAPO, 2503.14476, equation 11), and those that it drops."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from megatron_tlt.observe.reduction import RankMetrics, sums

if TYPE_CHECKING:
    from megatron_tlt.types import SampleGroup

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Dropped:
    """Groups without a gradient, and the rewards of their responses before overlong shaping."""

    groups: int = 0
    responses: int = 0  # that were judged
    reward: float = 0.0  # sum
    correct: int = 0

    @classmethod
    def of(cls, groups: Sequence[SampleGroup]) -> Dropped:
        """Those of dropped `groups`."""
        rewards = [reward for group in groups for reward in group.judged()]
        return cls(len(groups), len(rewards), sum(r.value for r in rewards), sum(r.correct for r in rewards))

    def __add__(self, other: Dropped) -> Dropped:
        return Dropped(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def mean_reward(self) -> float:
        """Of their responses; 0 without any."""
        return self.reward / max(1, self.responses)

    def __str__(self) -> str:
        if not self.responses:
            return f"{self.groups} groups, of which no response was judged"
        share = self.correct / self.responses
        why = {0.0: ": all wrong, prompts too hard or answers not found", 1.0: ": all right, prompts too easy"}
        return (
            f"{self.groups} groups with equal rewards, mean reward {self.mean_reward:.4g}, "
            f"{share:.1%} of responses correct{why.get(share, '')}"
        )


def look_at_kept(step: int, rounds: int, num_kept: int, wanted: int, num_surplus: int, dropped: Dropped) -> RankMetrics:
    """On rank 0, after the rollouts of `step` (1-based), from figures over all ranks: metrics, and a logged warning of
    a step that has fewer groups than `wanted`. `num_surplus`: groups with a gradient beyond those.
    """
    if num_kept < wanted:
        kept = f"{num_kept} of {wanted} groups"
        _log.warning("step %d: dynamic sampling kept %s in %d rollouts; it dropped %s", step, kept, rounds, dropped)
    row: dict[str, float] = {
        "sampling/rounds": rounds,
        "sampling/kept_groups": num_kept,
        "sampling/surplus_groups": num_surplus,
        "sampling/dropped_groups": dropped.groups,
    }
    if dropped.responses:
        row["sampling/dropped_reward"] = dropped.mean_reward
        row["sampling/dropped_accuracy"] = dropped.correct / dropped.responses
    return sums(row)
