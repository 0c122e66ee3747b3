"""What was drafted for a few answers, token by token, so that a person can look at it. Numpy only.

Costs a handful of microseconds in a speculative step while one of these answers runs, and nothing where there is no
trace. Legend: B running rows, N drafted nodes.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate

import numpy as np

from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.verify import Accepted

Run = tuple[int, int, list[int]]
"""Output position of the first drafted token, how many were accepted, and the trunk's tokens that were not."""

_KEPT = 64  # notes before they are made into runs: drafts are larger than what is kept of them


class DraftTrace:
    """Follows every answer to some prompts."""

    def __init__(self, prompt_ids: Collection[int]):
        self._prompt_ids = frozenset(prompt_ids)
        self._live: list[Request] = []
        self._notes: list[tuple[list[tuple[int, int]], list[int], list[int], Draft, Accepted]] = []
        self._runs: dict[tuple[int, int], list[Run]] = {}

    def start(self, request: Request) -> None:
        """A request got its row."""
        if request.prompt_id in self._prompt_ids:
            self._live.append(request)

    def stop(self, request: Request) -> None:
        """A request is about to leave its row, perhaps to come back."""
        if request.prompt_id in self._prompt_ids:
            self._live.remove(request)

    def note(self, draft: Draft, accepted: Accepted, rows: RunningRows) -> None:
        """A step verified `draft`; its tokens are not committed yet."""
        if not self._live:
            return
        at = [request.row for request in self._live]
        keys = [(request.prompt_id, request.sample_index) for request in self._live]
        self._notes.append((keys, at, rows.output_len[at].tolist(), draft, accepted))
        if len(self._notes) >= _KEPT:
            self._make_runs()

    def runs(self, prompt_id: int, sample_index: int) -> list[Run]:
        """What was drafted for an answer, by position. An accepted count may reach beyond the answer's end."""
        self._make_runs()
        return self._runs.get((prompt_id, sample_index), [])

    def _make_runs(self) -> None:
        notes, self._notes = self._notes, []
        for keys, at, positions, draft, accepted in notes:
            counts = draft.counts.tolist()
            ends = list(accumulate(counts))
            tokens, emitted = draft.tokens.tolist(), accepted.counts.tolist()
            for key, row, position in zip(keys, at, positions, strict=True):
                first, last = ends[row] - counts[row], ends[row]
                if first == last:
                    continue
                taken = emitted[row] - 1
                if draft.parents is None:
                    refused = tokens[first + taken : last]
                else:
                    refused = _refused_trunk(draft, accepted, first, last)
                self._runs.setdefault(key, []).append((position, taken, refused))


def _refused_trunk(draft: Draft, accepted: Accepted, first: int, last: int) -> list[int]:
    """Tokens of a tree's trunk, which stands first in its row at index depth - 1, that were not accepted."""
    nodes = np.arange(first, last)
    trunk = nodes[draft.depths[first:last] == nodes - first + 1]
    refused: list[int] = draft.tokens[trunk[~accepted.accepted[trunk]]].tolist()
    return refused
