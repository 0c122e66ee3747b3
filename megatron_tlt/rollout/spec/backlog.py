"""Plain steps that the drafters have yet to hear of: while nobody drafts, following costs a list's append.

Legend: B rows, k steps in the backlog, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.rollout.rows import RunningRows


@dataclass(slots=True)
class RowsThen:
    """What `EagleDrafter.take_hidden` reads of the rows, as it was before the first step of a backlog."""

    num_rows: int
    slots: np.ndarray  # int32 [B]
    positions: np.ndarray  # int32 [B]


@dataclass(slots=True)
class Told:
    """Several steps as one: each row emitted k tokens."""

    rows: RowsThen
    tokens: np.ndarray  # int32 [B * k], row by row
    counts: np.ndarray  # int32 [B], all k
    hidden: Tensor | None  # [B * k, H], where there is a drafter that wants it


class Backlog:
    """Plain steps of the same B rows. Whoever changes the rows must `take` before."""

    def __init__(self, rows: RunningRows, most: int):
        """`most` >= 1: steps until it is full."""
        self._rows, self._most = rows, most
        self._tokens: list[np.ndarray] = []
        self._hidden: list[Tensor] = []
        self._then: RowsThen | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, tokens: np.ndarray, hidden: Tensor | None) -> bool:
        """One more step, before its commit: `tokens` int32 [B] and their `hidden` [B, H]. Whether it is now full.

        Keeps both arrays.
        """
        if self._then is None:
            count, rows = len(tokens), self._rows
            self._then = RowsThen(count, rows.slots[:count].copy(), rows.positions[:count].copy())
        self._tokens.append(tokens)
        if hidden is not None:
            self._hidden.append(hidden)
        return len(self._tokens) >= self._most

    def take(self) -> Told:
        """Everything, which there must be. Empties the backlog."""
        then, steps = self._then, len(self._tokens)
        assert then is not None
        tokens = self._tokens[0] if steps == 1 else np.stack(self._tokens, axis=1).reshape(-1)
        hidden = None
        if self._hidden:
            hidden = self._hidden[0]
            if steps > 1:
                hidden = torch.stack(self._hidden, dim=1).flatten(0, 1)
        self._tokens, self._hidden, self._then = [], [], None
        return Told(then, tokens, np.full(then.num_rows, steps, np.int32), hidden)
