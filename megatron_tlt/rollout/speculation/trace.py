"""Drafts for a few responses, token by token, for the report. Numpy only.

Legend: B running rows, N drafted tokens.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.speculation.verify import Accepted

Run = tuple[int, int, list[int]]
"""A verified draft: output position of its first token, number of accepted tokens, the refused tokens."""


class DraftTrace:
    """Keeps the runs of every response to some prompts."""

    def __init__(self, prompt_ids: Collection[int]):
        """`prompt_ids` is read at every step: prompts may join."""
        self._prompt_ids = prompt_ids
        self._runs: dict[tuple[int, int], list[Run]] = {}

    def add(self, draft: Draft, accepted: Accepted, rows: RunningRows) -> None:
        """A step verified `draft`; its tokens are not committed yet. Mutates the runs."""
        traced = [request for request in rows.requests if request.prompt_id in self._prompt_ids]
        if not traced:
            return
        ends = np.cumsum(draft.counts).tolist()
        for request in traced:
            row = request.row
            drafted = slice(ends[row] - int(draft.counts[row]), ends[row])
            if drafted.start < drafted.stop:
                refused = draft.tokens[drafted][~accepted.accepted[drafted]].tolist()
                run = int(rows.output_len[row]), int(accepted.counts[row]) - 1, refused
                self._runs.setdefault((request.prompt_id, request.sample_index), []).append(run)

    def runs(self, prompt_id: int, sample_index: int) -> list[Run]:
        """The drafts of a response, by position. An accepted count may reach beyond the response's end."""
        return self._runs.get((prompt_id, sample_index), [])
