"""The trained drafter in the engine: keeps its cache in step with the policy's, drafts, calibrates its match rates.

The drafter's pair at position s is (token at s, policy's hidden state of s - 1), which is read in the paged hidden
states. Prompts are fed to it while they are prefilled, the pairs behind the last drafted position when the next draft
is made. So plain decoding costs nothing, and drafting may begin at any time: of more than `decoder.CATCH_UP` missing
pairs only the last ones are fed, and the drafter attends to nothing before them.

Legend: B rows, T pairs, N drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np

from megatron_tlt.drafters.decoder import (
    BUCKET_WIDTH,
    BUCKETS,
    POSITIONS,
    DrafterDecoder,
    DraftingRows,
    Pairs,
)
from megatron_tlt.models.decoders.base import KVCache
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.rollout.batch import Batch, PrefillChunk
from megatron_tlt.rollout.paged_hidden_states import PagedHiddenStates
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.speculation.base import Drafter
from megatron_tlt.rollout.speculation.match_rates import MatchRates
from megatron_tlt.types import DraftStrategy


class TrainedDrafter(Drafter):
    """A drafter around a `DrafterDecoder`. `propose` caches the missing pairs."""

    kind = "trained"

    def __init__(self, decoder: DrafterDecoder, rows: RunningRows, pages: PagedHiddenStates):
        """`pages` are written by the model runner. Allocates the drafter's cache, of as many blocks."""
        self.decoder, self._rows, self._pages = decoder, rows, pages
        self.kv: KVCache = decoder.new_kv_cache(pages.num_blocks, pages.block_size)
        slots = len(rows.limit)
        self._synced = np.zeros(slots, np.int32)  # last position whose pair is in the drafter's cache
        self._first = np.ones(slots, np.int32)  # first position that the drafter attends to
        running = DraftingRows(
            slot=rows.slots,
            positions=rows.positions,
            output_len=rows.output_len,
            block_tables=rows.block_tables,
            outputs=rows.outputs,
            keys=rows.keys,
            temperature=rows.temperature,
            synced=self._synced,
            first=self._first,
        )
        self._drafts = decoder.row_drafter(self.kv, running, pages.data)
        self._match_rates = _match_rates()

    def release(self) -> None:
        """Frees the cache's memory until `resume`, after the runner has freed its own. Mutates."""
        self.kv.release()
        self._drafts.point_at(self.kv, self._pages.data)

    def resume(self) -> None:
        """Allocates the memory again, after the runner has. Mutates."""
        self.kv.resume(self.decoder.new_kv_cache)
        self._drafts.point_at(self.kv, self._pages.data)

    def steps(self) -> list[tuple[Hashable, Callable[[], object]]]:
        """Steps that the policy's pool captures; see `RowDrafter.steps`."""
        return self._drafts.steps()

    def feed_chunks(self, batch: Batch) -> None:
        """Caches the pairs of the prefill chunks of `batch`, which the policy has computed. Mutates the cache."""
        columns: list[tuple[np.ndarray, ...]] = []
        size = self.kv.block_size
        for chunk in batch.chunks:
            first = max(1, _first_pair(chunk))  # position 0 has no hidden state before it
            if chunk.end <= first:
                continue
            positions = np.arange(first - 1, chunk.end, dtype=np.int32)
            slots = np.asarray(chunk.prefill.blocks, np.int32)[positions // size] * size + positions % size
            columns.append((chunk.prefill.tokens[first : chunk.end], positions[1:], slots[1:], slots[:-1]))
        if columns:
            joined = (np.concatenate(column).astype(np.int32) for column in zip(*columns, strict=True))
            self.decoder.feed(Pairs(*joined), self._pages.data, self.kv)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies the pairs of blocks (from, to), as the scheduler copied the policy's. Mutates the cache."""
        self.decoder.copy_blocks(self.kv, [c[0] for c in copies], [c[1] for c in copies])

    def start(self, request: Request) -> None:
        """All pairs are cached but that of the last output token. Mutates."""
        cached = int(self._rows.positions[request.row])
        self._synced[request.slot], self._first[request.slot] = cached - 1, 1

    def weights_changed(self) -> None:
        """The decoder has loaded other weights: match rates of those before weigh little. Mutates."""
        self._match_rates.fade()

    def propose(self, rows: RunningRows, lengths: np.ndarray, strategy: DraftStrategy) -> Draft:
        if not lengths.any():
            return Draft.empty(rows.num_rows)
        return self._drafts.draft(lengths, self._match_rates.rates, strategy.min_cumulative_acceptance)

    def observe(self, draft: Draft, reached: np.ndarray, accepted: np.ndarray) -> None:
        if draft.feature is not None:
            self._match_rates.observe(draft.feature[reached], accepted[reached])


def _first_pair(chunk: PrefillChunk) -> int:
    """The position from which on the drafter's cache may lack pairs. Where a chunk continues a parked request, these
    are of its last drawn turn: pairs behind the last draft were never fed.
    """
    prefill = chunk.prefill
    if not prefill.kept or chunk.start != prefill.kept:
        return chunk.start
    request = prefill.children[0]
    before = request.given[:-1] if len(request.output) == len(prefill.tokens) - len(request.prompt) else request.given
    turn_start = before[-1][1] if before else 0
    return min(chunk.start, len(request.prompt) + turn_start)


def _match_rates() -> MatchRates:
    """Rates of drafted tokens by position and by the gap of their score to that of the second candidate.

    A token whose score exceeds the second best by much is seldom wrong; of two near-equal ones each is right half of
    the time. The last position stands for all later ones.
    """
    gaps = (np.arange(BUCKETS) + 0.5) * BUCKET_WIDTH
    prior = np.broadcast_to(1.0 - 0.55 * np.exp(-gaps), (POSITIONS, BUCKETS))
    return MatchRates(prior, strength=16.0, memory=4096.0, is_ordered=True)
