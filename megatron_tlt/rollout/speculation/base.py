"""The interface of drafters. Legend: B running rows, N drafted tokens."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.types import DraftStrategy


class Drafter(Protocol):
    """Proposes tokens for running requests. A wrong proposal costs time, never a different response.

    A request is passed to `start` when it gets its row (again after a preemption), and to `finish` once it is finished.
    Tensor-parallel ranks make the same calls; rank 0's draft counts.
    """

    kind: str

    def start(self, request: Request) -> None:
        """`request` now has a row and a slot; `request.output` are its tokens so far. Mutates the drafter."""

    def sync_context(self, rows: RunningRows) -> None:
        """Reads the tokens that the B rows have drawn since the last call. Mutates; by default it reads nothing."""
        return

    def finish(self, request: Request) -> None:
        """`request` is finished, perhaps with its first token and without a row. Mutates, but for the default."""
        return

    def propose(self, rows: RunningRows, lengths: np.ndarray, strategy: DraftStrategy) -> Draft:
        """Up to `lengths` int32 [B] tokens in a row for each row (0: none), none of them below the least cumulative
        acceptance of `strategy`.
        """

    def observe(self, draft: Draft, reached: np.ndarray, accepted: np.ndarray) -> None:
        """Learns from the verified `draft`. `reached` bool [N]: all tokens before it were emitted; `accepted`: it, too.

        Mutates the calibration.
        """

    def end_generate(self) -> None:
        """The engine is idle: frees the state of the call. Mutates, but for the default."""
        return


class NoDrafter(Drafter):
    """Drafts nothing."""

    kind = "none"

    def propose(self, rows: RunningRows, lengths: np.ndarray, strategy: DraftStrategy) -> Draft:
        return Draft.empty(rows.num_rows)

    def start(self, request: Request) -> None:
        return

    def observe(self, draft: Draft, reached: np.ndarray, accepted: np.ndarray) -> None:
        return
