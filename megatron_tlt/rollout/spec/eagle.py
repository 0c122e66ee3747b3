"""The trained drafter in the engine: keeps its cache in step with the policy's, drafts, learns how far to trust itself.

The drafter's pair at position s is (token at s, policy's hidden state of s - 1), which is read in the pages
(`rollout.pages`). Prompts are fed to it while they are prefilled, the pairs behind the last drafted position when the
next draft is wanted. So plain decoding pays nothing, and drafting may begin at any time: if more than `window`
positions have passed, the drafter starts with the window and sees nothing before it.

Legend: B rows, A rows that draft, T pairs, S chunks, H hidden size, W window, L drafted tokens, K candidates, N nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.models.base import KVCache
from megatron_tlt.models.eagle.base import (
    BUCKET_WIDTH,
    BUCKETS,
    DEPTHS,
    DraftParams,
    DraftRows,
    EagleDecoder,
    EagleInput,
)
from megatron_tlt.models.inputs import DecoderInput
from megatron_tlt.models.native.pairs import DraftingRows, NativePairs, native_pairs
from megatron_tlt.rollout.batch import Batch
from megatron_tlt.rollout.paged_hidden_states import PagedHiddenStates
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.survival import Calibrator
from megatron_tlt.types import DraftStrategy


class EagleDrafter:
    """A `rollout.spec.base.Drafter` around an `EagleDecoder`."""

    kind = "eagle"

    def __init__(
        self,
        decoder: EagleDecoder,
        rows: RunningRows,
        pages: PagedHiddenStates,
        window: int,
    ):
        """`pages` are written by whoever runs the policy."""
        self.decoder, self._rows, self._window = decoder, rows, window
        self._pages, self._size, self._device = pages, pages.block_size, pages.data.device
        self.kv: KVCache = decoder.new_kv_cache(pages.num_blocks, pages.block_size)
        slots = len(rows.limit)
        self._synced = np.zeros(slots, np.int32)  # last position whose pair is in the drafter's cache
        self._first = np.ones(slots, np.int32)  # first position that the drafter sees
        here = (rows.slots, rows.positions, rows.output_len, rows.block_tables, rows.keys, rows.temperature)
        kept = DraftingRows(*here, self._synced, self._first)
        self._native = native_pairs(decoder, self.kv, kept, pages.data, window)
        self.calibrator = Calibrator(DEPTHS, BUCKETS)

    def release(self) -> None:
        """Gives the cache's memory back until `resume`, after the runner has given its own. Mutates."""
        self.kv.release()
        self._point()

    def resume(self) -> None:
        """Takes the memory again, after the runner has. Mutates."""
        self.kv.take(self.decoder.new_kv_cache(self.kv.num_blocks, self.kv.block_size))
        self._point()

    def _point(self) -> None:
        if self._native is not None:
            self._native.point_at(self.kv, self._pages.data)

    # Following the policy

    def feed_chunks(self, batch: Batch) -> None:
        """Prefill chunks of `batch` were computed. Mutates the cache."""
        columns: list[list[np.ndarray]] = [[], [], [], []]  # tokens, positions, slots; slots of the states
        starts, ends, tables = [0], [], []
        for chunk in batch.chunks:
            first = max(1, chunk.start)  # position 0 has no hidden state before it
            if chunk.end <= first:
                continue
            table = np.asarray(chunk.prefill.blocks, np.int32)
            positions = np.arange(first - 1, chunk.end, dtype=np.int32)
            slots = table[positions // self._size] * self._size + positions % self._size
            made = (chunk.prefill.tokens[first : chunk.end], positions[1:], slots[1:], slots[:-1])
            for column, part in zip(columns, made, strict=True):
                column.append(part)
            starts.append(starts[-1] + chunk.end - first)
            ends.append(chunk.end)
            tables.append(table)
        if not tables:
            return
        padded = np.zeros((len(tables), max(map(len, tables))), np.int32)  # [S, blocks of the longest]
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        tokens, positions, slots, before = map(np.concatenate, columns)
        begins = np.array(starts)
        arrays = (tokens, positions, slots, begins, np.array(ends), padded, begins[1:] - 1)
        fed = DecoderInput.of([self._put(a) for a in arrays])
        first_visible = torch.ones(len(tables), dtype=torch.int32, device=self._device)
        states = self._pages.data[self._put(before, np.int64)]
        self.decoder.forward(EagleInput(fed, states, first_visible), self.kv)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """The scheduler copied blocks (from, to): the pairs in them go along."""
        self.decoder.copy_blocks(self.kv, [c[0] for c in copies], [c[1] for c in copies])

    def start(self, request: Request) -> None:
        """All pairs are cached but that of the last output token."""
        cached = int(self._rows.positions[request.row])
        self._synced[request.slot], self._first[request.slot] = cached - 1, 1

    def sync_context(self, rows: RunningRows, strategy: DraftStrategy) -> None:
        """Nothing: `propose` reads what it has missed."""

    def stop(self, request: Request) -> None:
        """Nothing to free: the slot is set up afresh by its next request."""

    def end_generate(self) -> None:
        """Nothing: see `stop`."""

    def state_dict(self) -> dict[str, Any]:
        """Match rates by gap."""
        return self.calibrator.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict`'s."""
        self.calibrator.load_state_dict(state)

    # Drafting

    def propose(self, rows: RunningRows, lengths: np.ndarray, strategy: DraftStrategy) -> Draft:
        """See `Drafter.propose`."""
        if not lengths.any():
            return Draft.empty(rows.num_rows)
        if self._native is not None:
            return self._propose_native(self._native, rows, lengths, strategy)
        # A row whose last pair is cached already has nothing to start from.
        new = self._synced[rows.slots[: len(lengths)]] < rows.positions[: len(lengths)]
        active = np.flatnonzero((lengths > 0) & new)
        if not len(active):
            return Draft.empty(rows.num_rows)
        params = DraftParams(
            keys=rows.keys[active],
            output_positions=rows.output_len[active],
            temperature=rows.temperature[active],
            max_len=np.ascontiguousarray(lengths[active], np.int32),
            topk=strategy.topk,
            rates=self.calibrator.rates,
            min_cumulative_acceptance=strategy.min_cumulative_acceptance,
        )
        drafted = self.decoder.draft(self._missing_pairs(rows, active), params, self.kv)
        self._synced[rows.slots[active]] = rows.positions[active]
        return self._to_draft(drafted, active, rows, strategy.topk)

    def _propose_native(
        self, native: NativePairs, rows: RunningRows, lengths: np.ndarray, strategy: DraftStrategy
    ) -> Draft:
        """The same in one call."""
        rates, least = self.calibrator.rates, strategy.min_cumulative_acceptance
        if strategy.topk == 1:
            counts, tokens, cumulative_acceptance, depths, feature = native.chains(
                rows.outputs, lengths, rates, least
            )
            return Draft(counts, tokens, cumulative_acceptance, depths, None, feature)
        active, drafted = native.rows(rows.outputs, lengths, strategy.topk, rates, least)
        if not len(active):
            return Draft.empty(len(lengths))
        return self._to_draft(drafted, active, rows, strategy.topk)

    def _missing_pairs(self, rows: RunningRows, active: np.ndarray) -> EagleInput:
        """The pairs between the drafter's last one and each row's root, as one ragged batch."""
        slots, last = rows.slots[active], rows.positions[active]
        first = np.maximum(self._synced[slots] + 1, last - self._window + 1)
        late = first > self._synced[slots] + 1
        if late.any():
            self._first[slots[late]] = first[late]
        counts = last - first + 1
        ends = np.cumsum(counts)
        row = np.repeat(np.arange(len(active)), counts)
        positions = np.arange(int(ends[-1])) - np.repeat(ends - counts - first, counts)
        behind = last[row] - positions  # tokens after this one
        tokens = rows.outputs[slots[row], rows.output_len[active][row] - 1 - behind]
        block, inside = np.divmod(positions, self._size)
        slot_mapping = rows.block_tables[active[row], block] * self._size + inside
        block, inside = np.divmod(positions - 1, self._size)
        before = rows.block_tables[active[row], block] * self._size + inside
        starts = np.zeros(len(active) + 1, np.int32)
        starts[1:] = ends
        tables = rows.block_tables if len(active) == rows.num_rows else rows.block_tables[active]
        arrays = (tokens, positions, slot_mapping, starts, last + 1, tables[: len(active)], starts[1:] - 1)
        batch = DecoderInput.of([self._put(a) for a in arrays])
        return EagleInput(batch, self._pages.data[self._put(before, np.int64)], self._put(self._first[slots]))

    def _put(self, array: np.ndarray, dtype: type = np.int32) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(self._device)

    def _to_draft(self, drafted: DraftRows, active: np.ndarray, rows: RunningRows, topk: int) -> Draft:
        count, depth = rows.num_rows, drafted.tokens.shape[1]
        lengths = np.zeros(count, np.int32)
        lengths[active] = drafted.lengths
        is_node = np.arange(depth) < drafted.lengths[:, None]  # [A, L]
        bucket = np.minimum(drafted.gaps[:, :, 0] / BUCKET_WIDTH, BUCKETS - 1).astype(np.int32)
        place = np.minimum(np.arange(depth), DEPTHS - 1).astype(np.int32)
        feature = place * BUCKETS + bucket
        at = np.broadcast_to(np.arange(1, depth + 1, dtype=np.int32), is_node.shape)
        trunk = Draft(
            lengths,
            drafted.tokens[:, :, 0][is_node],
            drafted.cumulative_acceptance[is_node],
            at[is_node],
            None,
            feature[is_node],
        )
        return trunk if topk == 1 else self._with_siblings(trunk, drafted, active)

    def _with_siblings(self, trunk: Draft, drafted: DraftRows, active: np.ndarray) -> Draft:
        """Adds the second to K-th candidates beside every token of the trunk, as leaves behind it."""
        rates = self.calibrator.sibling_rates  # [K - 1, BUCKETS]
        parts: list[list[np.ndarray]] = [[], [], [], [], []]
        counts = np.zeros_like(trunk.counts)
        starts = np.cumsum(trunk.counts) - trunk.counts
        for i, row in enumerate(active.tolist()):
            n = int(drafted.lengths[i])
            mine = slice(int(starts[row]), int(starts[row]) + n)
            cumulative_acceptance = trunk.cumulative_acceptance[mine]
            above = np.concatenate((np.ones(1, np.float32), cumulative_acceptance))[:n]
            columns = (
                trunk.tokens[mine],
                cumulative_acceptance,
                trunk.depths[mine],
                np.arange(-1, n - 1, dtype=np.int32),
            )
            assert trunk.feature is not None
            for part, column in zip(parts, (*columns, trunk.feature[mine]), strict=True):
                part.append(column)
            for k in range(1, drafted.tokens.shape[2]):
                gap = np.minimum(drafted.gaps[i, :n, k] / BUCKET_WIDTH, BUCKETS - 1).astype(np.int32)
                mark = (DEPTHS + k - 1) * BUCKETS + gap
                share = above * rates[k - 1, gap]
                sibling = (drafted.tokens[i, :n, k], share, trunk.depths[mine], columns[3], mark)
                for part, column in zip(parts, sibling, strict=True):
                    part.append(column)
            counts[row] = n * drafted.tokens.shape[2]
        tokens, cumulative_acceptance, depths, parents, feature = (np.concatenate(p) for p in parts)
        return Draft(counts, tokens, cumulative_acceptance.astype(np.float32), depths, parents, feature)

    def observe(self, draft: Draft, reached: np.ndarray, accepted: np.ndarray) -> None:
        """See `Drafter.observe`."""
        if draft.feature is None:
            return
        if draft.parents is None:
            self.calibrator.observe_cells(draft.feature[reached], accepted[reached])
            return
        place, bucket = np.divmod(draft.feature[reached], BUCKETS)
        matched = accepted[reached]
        trunk = place < DEPTHS
        self.calibrator.observe(place[trunk], bucket[trunk], matched[trunk])
        if not trunk.all():
            self.calibrator.observe_siblings(place[~trunk] - DEPTHS, bucket[~trunk], matched[~trunk])
