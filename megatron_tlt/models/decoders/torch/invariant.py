"""Batch-invariant arithmetic without Triton: a row's bits do not depend on the rows that share its forward.

BLAS and elementwise kernels choose how they sum, and where their vectors end, by the shapes of a call. So every product
here has one shape: the packed rows are cut into tiles of `TILE` rows (the last one padded), each tile goes through the
whole model alone, and a row attends in a call of its own. One assumption is left, that a library treats the rows of one
product alike: before the first forward equal rows go through the model, and must come out equal.

Legend: T packed rows, R = TILE, C keys of a row, Hq/Hkv query and kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_tlt.errors import BackendError
from megatron_tlt.models.decoders.inputs import DecoderInput
from megatron_tlt.models.decoders.torch.attention import gather_heads, table_slots

TILE = 16


@dataclass(slots=True)
class RowTile:
    """TILE rows of a batch, the last tile's filled up with rows that write to the scratch slot."""

    token_ids: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    slots: Tensor  # [R] int64, where the rows' own keys and values go
    plan: TilePlan
    used: int  # rows that are not padding


class TilePlan:
    """Attention of one tile, a row at a time: each over its own keys. See `attention.AttentionPlan`."""

    def __init__(self, slots: list[Tensor]):
        """`slots` [C] of each row are those of its keys, in order of position."""
        self._slots = slots

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [R, Hq, D], keys and values [slots, Hkv, D] -> [R, Hq, D]; scores and sums in float32."""
        heads, d = keys.shape[-2:]
        rows = []
        for query, slots in zip(q.split(1), self._slots, strict=True):
            k, v = (gather_heads(cache, slots[None]).float() for cache in (keys, values))
            grouped = query.float().clone().view(1, heads, -1, d)  # a kv head's query heads as rows that see the same
            rows.append(scaled_dot_product_attention(grouped, k, v).view(query.shape))
        return torch.cat(rows).to(q.dtype)


def rowwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of [R, n] that rounds all rows alike.

    On CPU the elements behind the last full vector of a call, or of a thread's share, take another code path, which
    may round otherwise: there each row is a call of its own.
    """
    if x.device.type != "cpu":
        return function(x)
    return torch.cat([function(row.clone()) for row in x.split(1)])


def row_tiles(batch: DecoderInput, block_size: int, scratch_slot: int) -> Iterator[RowTile]:
    """The batch in tiles, in row order: a row attends to its own tile and earlier ones."""
    starts, tokens = batch.query_start.tolist(), batch.token_ids.tolist()
    owner = [s for s, (a, b) in enumerate(pairwise(starts)) for _ in range(a, b)]
    positions, own = batch.positions.tolist(), batch.slot_mapping.tolist()
    device = batch.positions.device

    def keys_of(row: int) -> Tensor:
        table = batch.block_tables[owner[row] : owner[row] + 1]
        return table_slots(table, positions[row] + 1, block_size)[0]

    for begin in range(0, len(own), TILE):
        rows = range(begin, min(begin + TILE, len(own)))
        fill = TILE - len(rows)

        def column(values: list[int], padding: int = 0, rows: range = rows, fill: int = fill) -> Tensor:
            return torch.tensor([values[row] for row in rows] + [padding] * fill, device=device)

        slots = column(own, scratch_slot)
        keys = [keys_of(row) for row in rows] + [slots[-1:]] * fill
        yield RowTile(column(tokens), column(positions), slots, TilePlan(keys), len(rows))


def by_tiles(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of [T, n] rows in calls of exactly TILE rows, the last one padded with zeros."""
    if x.shape[0] == 0:
        return function(x)
    parts = []
    for part in x.split(TILE):
        padded = x.new_zeros(TILE, x.shape[1])
        padded[: part.shape[0]] = part
        parts.append(function(padded)[: part.shape[0]])
    return torch.cat(parts)


def check_rows_alike(rows: Tensor) -> None:
    """Raises BackendError unless the TILE `rows`, which went through the model as equal ones, came out equal."""
    if not torch.equal(rows, rows[:1].expand_as(rows)):
        raise BackendError(
            "rollout.numerics 'invariant': on this machine equal rows of a call are rounded differently by their place "
            f"in it ({torch.get_num_threads()} threads); use rollout.kernels 'native', or another OMP_NUM_THREADS"
        )
