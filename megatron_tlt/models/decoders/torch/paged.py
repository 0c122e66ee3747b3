"""Paged attention that reads keys and values in place: the inputs of the kernel for one batch.

The cache is walked block by block, so nothing is gathered and a step's work follows the real context, not the longest
one of the batch or the bucket of a graph. `models/decoders/factory.py` chooses the kernel, `kernels.attention`.

    keys of row i of a sequence:  cached positions [low, first)  by its block table
                                  rows j of the sequence         by their slots, j <= i

Of a block drafter (`attend` with `own`) all rows j of the sequence, from tensors of their own, and of the cached
positions those within a layer's window.

One program has the rows of one *tile* and one *split* of the cached positions; the last split also takes the rows' own
keys. Tiles of few rows (decoding, verifying) have all query heads of a kv head folded in, so that its keys are read
once; a prefill chunk's have 64 rows of one query head. Splits keep a GPU busy where sequences are few and long.

Invariant plans (`rollout.numerics`) give a row the same bits in every batch: all tiles are of one size, their number of
splits follows from the model, and a row's keys come from the cache by absolute position, its own as well: split s of S
folds positions [64 i, 64 (i + 1)) for i = s, s + S, ...

Legend: T packed rows, S sequences, W most rows of a sequence, P tiles, M blocks of a table, G query heads a kv head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from megatron_tlt.models.decoders.inputs import DecoderInput

_MOST_FOLDED = 64  # rows times query heads of one tile; sequences of so many rows have tiles of one head
_LEAST_FOLDED = 16  # of a matrix product
_SPLIT_TOKENS = 64  # cached positions of a program at least: one fold of the kernel
_INVARIANT_PROGRAMS = 32  # splits times kv heads: a quarter of the processors at batch 1, a third of a row's memory
_MOST_SPLITS = 64  # of 2 kv heads they fill the processors of an H100 at batch 1; `_combine` has them in registers

# q [T, Hq, D], keys and values [slots, Hkv, D] (one layer's cache, flat), the batch's plan, and the last two arguments
# of `PagedPlan.attend` -> [T, Hq, D]
PagedRun = Callable[[Tensor, Tensor, Tensor, "PagedPlan", Tensor | None, int], Tensor]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one size, one launch."""

    at: Tensor  # [P, 2] int32: sequence, its first row
    folded: int  # rows times query heads of a tile, a power of two
    heads: int  # query heads folded in: G or 1

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.folded // self.heads


class PagedPlan:
    """One batch's tiles and masks; made once a forward, used by every layer. See `attention.AttentionPlan`.

    With `rows_each` every sequence has so many rows, and no value comes to the host: a CUDA graph may capture it.
    """

    def __init__(
        self,
        run: PagedRun,
        batch: DecoderInput,
        block_size: int,
        heads: tuple[int, int],
        rows_each: int | None = None,
        first_visible: Tensor | None = None,
        splits: int | None = None,
        is_invariant: bool = False,
    ):
        """`heads` are kv heads and G of this rank. `first_visible` [S]: no row sees a position before it, but itself.

        `splits` (a power of two) is chosen by the device and the batch unless it is given, with `is_invariant` by the
        model: then the batch's tables name the blocks of the rows themselves, too.
        """
        self._run, self.block_size = run, block_size
        kv_heads, group = heads
        device = batch.positions.device
        self.starts, self.tables = _ints(batch.query_start), _ints(batch.block_tables)
        self.slots = _ints(batch.slot_mapping)
        last = batch.positions.shape[0] - 1  # a sequence without rows has no first one, and no tile
        self.first = _ints(batch.positions[batch.query_start[:-1].long().clamp(max=last)])  # [S]
        self.low = None if first_visible is None else _ints(first_visible)
        self.ends = _ints(batch.context_lens) if is_invariant else None  # [S]
        counts = list(_counts(batch, rows_each))
        few = [n if n < _MOST_FOLDED else 0 for n in counts]
        many = [n - short for n, short in zip(counts, few, strict=True)]
        least = max(_LEAST_FOLDED, _power_of_two(group))
        folded = max(least, min(_MOST_FOLDED, _power_of_two(max(few) * group)))
        kinds = [(few, 1, folded, group), (many, _MOST_FOLDED, _MOST_FOLDED, 1)]
        if is_invariant:
            kinds, splits = [(counts, 1, _MOST_FOLDED, group)], max(1, _INVARIANT_PROGRAMS // _power_of_two(kv_heads))
        self.tiles = [_tiles(self.starts, *kind, rows_each is not None) for kind in kinds if any(kind[0])]
        programs = sum(len(t.at) * kv_heads * (group // t.heads) for t in self.tiles)
        longest = self.tables.shape[1] * block_size
        self.splits = splits or _splits(programs, longest, _processors(device))

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, own: Tensor | None = None, window: int = 0) -> Tensor:
        """q [T, Hq, D], keys and values [slots, Hkv, D] (one layer's cache, flat) -> [T, Hq, D]. With `own`
        [2, T, Hkv, D], keys and values of blocks as in `BlockPlan`; such a plan has a `first_visible`.
        """
        return self._run(q, keys, values, self, own, window)


def _ints(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int32).contiguous()


def _counts(batch: DecoderInput, rows_each: int | None) -> Sequence[int]:
    """Rows of every sequence; of ragged batches without `lengths` the host waits for the device."""
    if rows_each is not None:
        return [rows_each] * batch.context_lens.shape[0]
    if batch.lengths is not None:
        return batch.lengths.rows
    return [b - a for a, b in pairwise(batch.query_start.tolist())]


def _tiles(starts: Tensor, rows: Sequence[int], least: int, folded: int, heads: int, is_static: bool) -> Tiles:
    """Tiles of sequences of `rows` rows (0: of another kind, which has fewer than `least` or more than these). Made on
    the device, since a copy from a list on the host waits for the device, which a capture forbids.
    """
    each = folded // heads
    numbers = [-(-n // each) for n in rows]
    if is_static:
        at = torch.arange(sum(numbers), dtype=torch.int32, device=starts.device)
        return Tiles(torch.stack((at // numbers[0], at % numbers[0] * each), 1), folded, heads)
    counts = starts[1:] - starts[:-1]
    is_mine = (counts >= least) & (counts <= max(rows))
    tiles = torch.where(is_mine, (counts + each - 1) // each, 0)
    sequence = torch.repeat_interleave(tiles, output_size=sum(numbers))
    nth = torch.arange(sum(numbers), device=starts.device) - (tiles.cumsum(0) - tiles)[sequence]
    return Tiles(torch.stack((sequence, nth * each), 1).to(torch.int32), folded, heads)


def _splits(programs: int, longest: int, processors: int) -> int:
    """Splits of the cached positions: enough programs for two on every processor, none of them too short."""
    wanted = min(2 * processors // max(1, programs), longest // _SPLIT_TOKENS, _MOST_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


def _power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << (value - 1).bit_length()


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
