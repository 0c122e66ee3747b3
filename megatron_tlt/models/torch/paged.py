"""Paged attention that reads keys and values in place: the inputs of the kernel for one batch.

The cache is walked block by block, so nothing is gathered and a step's work follows the real context, not the longest
one of the batch or the bucket of a graph. `kernels.attention` is the kernel, chosen in `models/factory.py`.

    keys of row i of a sequence:  cached positions [low, first)  by its block table
                                  rows j of the sequence         by their slots, where `sees`[i, j] (chains: j <= i)

One program has the rows of one *tile* (all query heads of one kv head folded in) and one *split* of the cached
positions; the last split also takes the rows' own keys. Splits keep a GPU busy where sequences are few and long.

Legend: T packed rows, S sequences, W most rows of a sequence, P tiles, M blocks of a table, G query heads a kv head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from megatron_tlt.models.inputs import DecoderInput
from megatron_tlt.models.torch.attention import ancestors

_MOST_FOLDED = 64  # rows times query heads of one tile
_LEAST_FOLDED = 16  # of a matrix product
_SPLIT_TOKENS = 256  # cached positions that are worth a program of their own
_MOST_SPLITS = 32

# q [T, Hq, D], keys and values [slots, Hkv, D] (one layer's cache, flat), the batch's plan -> [T, Hq, D]
PagedRun = Callable[[Tensor, Tensor, Tensor, "PagedPlan"], Tensor]


class PagedPlan:
    """One batch's tiles and masks; made once a forward, used by every layer. See `attention.Plan`.

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
    ):
        """`heads` are kv heads and G of this rank. `first_visible` [S]: no row sees a position before it, but itself.

        `splits` (a power of two) is chosen by the device and the batch unless it is given.
        """
        self._run, self.block_size = run, block_size
        kv_heads, group = heads
        device = batch.positions.device
        self.starts, self.tables = _ints(batch.query_start), _ints(batch.block_tables)
        self.slots = _ints(batch.slot_mapping)
        last = batch.positions.shape[0] - 1  # a sequence without rows has no first one, and no tile
        self.first = _ints(batch.positions[batch.query_start[:-1].long().clamp(max=last)])  # [S]
        self.low = None if first_visible is None else _ints(first_visible)
        counts = _counts(batch, rows_each)
        self.folded = min(_MOST_FOLDED, max(_LEAST_FOLDED, _power_of_two(max(counts) * group)))
        self.folded = max(self.folded, _power_of_two(group))
        self.rows_each_tile = self.folded // group
        tiles = [(s, at) for s, n in enumerate(counts) for at in range(0, n, self.rows_each_tile)]
        if rows_each is None:
            self.tiles = torch.tensor(
                tiles, dtype=torch.int32, device=device
            )  # [P, 2]: sequence, its first row
        else:  # a tensor made from a list would cross from the host, which a capture forbids
            each = -(-rows_each // self.rows_each_tile)
            at = torch.arange(len(tiles), dtype=torch.int32, device=device)
            self.tiles = torch.stack((at // each, at % each * self.rows_each_tile), 1)
        self.sees = None if batch.parents is None else _sees(batch, max(counts), rows_each)
        longest = self.tables.shape[1] * block_size
        self.splits = splits or _splits(len(tiles) * kv_heads, longest, _processors(device))

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `attention.Plan.attend`."""
        return self._run(q, keys, values, self)


def _ints(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int32).contiguous()


def _counts(batch: DecoderInput, rows_each: int | None) -> list[int]:
    """Rows of every sequence; for ragged batches the host waits for the device."""
    if rows_each is not None:
        return [rows_each] * batch.context_lens.shape[0]
    return [b - a for a, b in pairwise(batch.query_start.tolist())]


def _sees(batch: DecoderInput, width: int, rows_each: int | None) -> Tensor:
    """uint8 [S, W, W]: row j of a sequence is row i or an ancestor of it."""
    assert batch.parents is not None
    parents, starts = batch.parents.long(), batch.query_start.long()
    if rows_each is not None:
        shaped = parents.view(-1, rows_each)
        local = torch.where(shaped < 0, -1, shaped - starts[:-1, None])
    else:
        counts = starts[1:] - starts[:-1]
        owner = torch.repeat_interleave(torch.arange(len(counts), device=parents.device), counts)
        local = torch.full((len(counts), width), -1, device=parents.device)
        within = torch.arange(len(parents), device=parents.device) - starts[owner]
        local[owner, within] = torch.where(parents < 0, -1, parents - starts[owner])
    return ancestors(local).to(torch.uint8).contiguous()


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
