"""Fitting sequences into token budgets and spreading work over ranks. Torch-free, pure, deterministic."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def pack_by_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Groups of indices whose lengths add up to at most `budget`, by first-fit decreasing.

    An item longer than the budget gets a group of its own. At most 11/9 of the best possible number of
    groups, plus 6/9 (Dósa 2007). Equal lengths keep their order, indices within a group ascend. Raises
    ValueError for a negative length or a budget below 1.
    """
    if budget < 1:
        raise ValueError(f"budget = {budget}: must be >= 1")
    if min(lengths, default=0) < 0:
        raise ValueError(f"length = {min(lengths)}: must be >= 0")
    groups: list[list[int]] = []
    free = np.zeros(len(lengths), dtype=np.int64)  # tokens left in group g; 0 for groups not yet opened
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        fits = free[: len(groups)] >= length
        first = int(fits.argmax()) if fits.any() else len(groups)
        if first == len(groups):
            groups.append([])
            free[first] = max(budget, length)
        groups[first].append(index)
        free[first] -= length
    return [sorted(group) for group in groups]


def balance(costs: Sequence[float], bins: int) -> list[int]:
    """The bin (0 to bins - 1) of every item, so that the fullest bin is light: longest processing time first.

    The fullest bin holds at most 4/3 - 1/(3 bins) of the best possible (Graham 1969). Ties go to the
    earlier item and the lower bin. Raises ValueError when there is no bin.
    """
    if bins < 1:
        raise ValueError(f"bins = {bins}: must be >= 1")
    loads: list[tuple[float, int]] = [(0, b) for b in range(bins)]
    chosen = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, chosen[index] = loads[0]
        heapq.heapreplace(loads, (load + costs[index], chosen[index]))
    return chosen
