"""One drafter out of the replicas': the arithmetic of `OnlineDrafterTrainer.merge`, on top of one summing collective.

Legend: P parameters, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_tlt.drafter.flat_state import FlatState

AllReduce = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class RankWindow:
    """What one rank did since the last merge."""

    tokens: int  # that it trained on
    optimizer_steps: int  # AdamW's, in all
    trained_steps: int  # the learning rate's, in all
    disabled: bool


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did; the same on every rank."""

    version: int  # of the drafter that all ranks hold now
    trained: bool  # False: nobody trained (or it was rolled back), and the drafter is what it was
    tokens: tuple[int, ...]  # by rank, trained on since the last merge
    disabled: tuple[int, ...]  # ranks whose training had failed before
    rolled_back: bool  # a mean was not finite: training is over on all ranks


def exchange_windows(
    mine: RankWindow, all_reduce: AllReduce, rank: int, size: int, device: torch.device
) -> list[RankWindow]:
    """Every rank's, by rank. Collective: each rank fills its row of a table that is summed."""
    table = torch.zeros(size, 4, dtype=torch.float64, device=device)
    row = (mine.tokens, mine.optimizer_steps, mine.trained_steps, mine.disabled)
    table[rank] = torch.tensor(row, dtype=torch.float64)
    all_reduce(table)
    return [RankWindow(int(a), int(b), int(c), bool(d)) for a, b, c, d in table.tolist()]


def merge_states(state: FlatState, weight: float, all_reduce: AllReduce) -> Tensor:
    """Weighted sum [4 P] over ranks of `FlatState.read`; this rank's weight is `weight`. Collective.

    A rank of weight 0 adds zeros, whatever its state is. If only one rank has a weight, it is 1, and the result
    is that rank's state bit for bit.
    """
    if weight:
        flat = state.read().mul_(weight)
    else:
        flat = torch.zeros(state.size, device=next(iter(state.parameters)).device)
    all_reduce(flat)
    return flat
