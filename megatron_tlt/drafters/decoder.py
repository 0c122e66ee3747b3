"""Interface of a trained drafter in rollouts, in PyTorch (`torch_decoder.py`) or C
(`eagle/native_decoder.py`, no block drafters).

A drafter of kind eagle or eagle3 reads pairs: at position s, the token there and a part of the policy's state
(`decoders.base.Decoder`) of position s - 1. Its output at s gives the distribution of the token at s + 1 and stands in
for the state of s: the next pair is (that token, that output). Keys and values of pair s are
cached in slot s of the policy's block tables (samples of a prompt share its blocks); slot 0 is never read. There is one
layer, so a cached pair costs the projections to its key and value and nothing else. What a pair means to a drafter of
kind dspark is in `dspark/decoder.py`.

Under tensor parallelism every rank holds and runs the whole drafter.

Legend: T pairs, B running rows, S slots of the engine, N drafted tokens of all rows, W width of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.drafters.model import DrafterConfig
from megatron_tlt.models.decoders.base import KVCache
from megatron_tlt.models.decoders.draft import Draft

RunStep = Callable[[Hashable, Callable[[], object]], object]

POSITIONS = 8  # draft positions of the match-rate table; the last row stands for all later ones
BUCKETS = 32  # of the gap between the scores of the best and the second candidate
BUCKET_WIDTH = 0.25  # score; bucket of a gap: min(BUCKETS - 1, floor(gap / BUCKET_WIDTH))
CATCH_UP = 256  # of a row's missing pairs at most so many, the last ones, are cached


@dataclass(slots=True)
class Pairs:
    """T pairs to cache; int32 numpy arrays [T]."""

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray  # where key and value go
    state_slots: np.ndarray  # of the state of the position before, in the paged states


@dataclass(frozen=True, slots=True)
class DraftingRows:
    """The engine's running rows: contiguous arrays that stay where they are and are read at every draft."""

    slot: np.ndarray  # int32 [B], of the row's request
    positions: np.ndarray  # int32 [B], of the row's last token
    output_len: np.ndarray  # int32 [B], tokens drawn so far
    block_tables: np.ndarray  # int32 [S, blocks]
    outputs: np.ndarray  # int32 [S, width], by slot: the `output_len` tokens drawn so far
    keys: np.ndarray  # uint64 [B], of the requests (`models.keys.request_key`)
    temperature: np.ndarray  # float32 [B], 0: greedy
    synced: np.ndarray  # int32 [S], last position whose pair is cached; written by drafts
    first: np.ndarray  # int32 [S], first position that the drafter attends to; written by drafts


class RowDrafter(Protocol):
    """Drafts for one set of running rows over one cache. Not thread-safe."""

    _kv: KVCache
    _pages: Tensor

    def point_at(self, kv: KVCache, pages: Tensor) -> None:
        """Uses this memory from now on. After a release it is empty, and no draft may follow. Captured graphs read the
        cache only, whose address they need.
        """
        self._kv, self._pages = kv, pages

    def draft(self, wanted: np.ndarray, rates: np.ndarray, min_acceptance: float) -> Draft:
        """Caches the missing pairs of each row, at most its last `CATCH_UP`, and drafts up to `wanted` int [B] tokens.

        `rates` float32 [POSITIONS, BUCKETS] estimates P(match); a draft ends before a token whose cumulative acceptance
        (the product of the match rates up to it) is below `min_acceptance`. A drafted token has the largest of
        logits / T + keyed noise; its `feature` is min(position, POSITIONS - 1) * BUCKETS + bucket of the gap to the
        second candidate. A row whose last pair is cached has nothing to start from and gets no draft. Writes the cache,
        at drafted positions too, and `synced` and `first`. Raises BackendError for arguments that do not fit and before
        all weights are loaded.
        """

    def steps(self) -> list[tuple[Hashable, Callable[[], object]]]:
        """Steps that a pool of graphs may capture, by key, the largest first; none where nothing can be captured."""
        return []


class DrafterDecoder(Protocol):
    """A drafter in the engine. Embedding and, of kind eagle, LM head are the policy decoder's, read at every call; of a
    reduced vocabulary its rows of the head are copied once a weight sync.
    """

    config: DrafterConfig
    kind: str  # "native" or "torch"
    dtype: torch.dtype

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """A cache of all its layers."""

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Memory of one block, in bytes."""

    def copy_blocks(self, kv: KVCache, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copies block src[i] to dst[i]."""

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Loads all tensors of `DrafterConfig.shapes`. Raises CheckpointError for wrong names or shapes."""

    def feed(self, pairs: Pairs, pages: Tensor, kv: KVCache) -> None:
        """Caches `pairs`; `pages` [slots, W] are the policy's states. Mutates `kv`."""

    def use_graphs(self, run_step: RunStep) -> None:
        """From now on steps run by `run_step(key, step)` (`GraphCache.run`), where they can be captured. Mutates."""
        return

    def row_drafter(self, kv: KVCache, rows: DraftingRows, pages: Tensor) -> RowDrafter:
        """Drafts for `rows`, whose hidden states are in `pages`."""


def step_batches(most: int) -> list[int]:
    """Numbers of rows, up to `most`, that steps are captured for: powers of two and `most`, the largest first."""
    return sorted({most, *(1 << bit for bit in range(most.bit_length()))}, reverse=True)


def slots_of(rows: DraftingRows, at: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """Slots [T] of positions [T] of rows `at` [T], by their block tables."""
    block, inside = np.divmod(positions, block_size)
    slots: np.ndarray = rows.block_tables[at, block] * block_size + inside
    return slots


def missing_pairs(rows: DraftingRows, active: np.ndarray, limit: int, block_size: int, but: int = 0) -> Pairs | None:
    """Pairs that rows `active` [A] have not cached, at most the last `limit` of each, without the last `but` of them;
    None where all are there. Mutates `synced` and `first`, as if they were cached.
    """
    slots, last = rows.slot[active], rows.positions[active]
    first = np.maximum(rows.synced[slots] + 1, last - limit + 1)
    late = first > rows.synced[slots] + 1
    rows.first[slots[late]] = first[late]
    rows.synced[slots] = last
    counts = np.maximum(0, last - first + 1 - but)
    if not counts.any():
        return None
    at = np.repeat(np.arange(len(active)), counts)
    positions = np.arange(len(at)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    tokens = rows.outputs[slots[at], rows.output_len[active][at] - 1 - (last[at] - positions)]
    places = (slots_of(rows, active[at], p, block_size) for p in (positions, positions - 1))
    return Pairs(*(np.asarray(a, np.int32) for a in (tokens, positions, *places)))


class DraftRecorder:
    """Collects the drafted tokens position by position, and decides where chains end."""

    def __init__(self, rows: int, rates: np.ndarray, min_acceptance: float):
        self._rows, self._rates, self._least = rows, rates, min_acceptance
        self._acceptance = np.ones(rows, np.float32)  # of each row's chain so far
        self._parts: list[tuple[np.ndarray, ...]] = []  # of each position: rows, then the columns of `Draft`

    def reachable(self, steps: int) -> int:
        """Positions, at most `steps`, that a chain with the best match rate at each of them reaches."""
        best, acceptance = self._rates.max(1), np.float32(1)
        for step in range(steps):
            acceptance *= best[min(step, POSITIONS - 1)]
            if acceptance < self._least:
                return step
        return steps

    def record(
        self, step: int, rows: np.ndarray, candidates: np.ndarray, scores: np.ndarray, may_go_on: np.ndarray
    ) -> np.ndarray:
        """Adds the candidates int32 and scores float32 [A', C], best first, of `rows` [A'] at draft position `step`.

        Returns bool [A']: chains that go on. A chain whose next token could not reach the least cumulative acceptance,
        however large that token's gap, ends here.
        """
        gap = scores[:, 0] - scores[:, 1] if scores.shape[1] > 1 else np.full(len(rows), np.inf, np.float32)
        position = min(step, POSITIONS - 1)
        # fmin: the gap of scores that are NaN or both inf is NaN, which no bucket is; it goes to the last, as in C.
        bucket = np.fmin(gap / BUCKET_WIDTH, BUCKETS - 1).astype(np.int32)
        self._acceptance[rows] *= self._rates[position, bucket]
        acceptance = self._acceptance[rows]
        kept = acceptance >= self._least
        feature = (position * BUCKETS + bucket[kept]).astype(np.int32)
        self._parts.append((rows[kept], candidates[kept, 0], acceptance[kept], feature))
        most = self._rates[min(step + 1, POSITIONS - 1)].max()
        goes_on: np.ndarray = kept & may_go_on & (acceptance * most >= self._least)
        return goes_on

    def result(self) -> Draft:
        """The drafts so far."""
        if not self._parts:
            none = np.empty(0, np.int32)
            return Draft(np.zeros(self._rows, np.int32), none, none.view(np.float32), none)
        rows, *drafted = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        order = np.argsort(rows, kind="stable")
        counts = np.bincount(rows, minlength=self._rows).astype(np.int32)
        return Draft(counts, *(column[order] for column in drafted))
