"""Batch-invariant arithmetic in PyTorch: a row's bits do not depend on the rows that share its forward.

BLAS and elementwise kernels choose how they sum, and where their vectors end, by the shapes of a call. So every call
here has one shape: the packed rows are cut into tiles of `TILE` rows (the last one padded), each tile goes through the
whole model alone, and attention walks a row's context in chunks of `CHUNK` keys, added in their order; masked keys add
an exact zero. What is left to trust is that a library treats the rows of one call alike; `check_rows_alike` tests that
with the model's own weights before the first forward.

Legend: T packed rows, R = TILE, C keys of the tile's longest row, rounded up to chunks, Hq/Hkv query and kv heads,
G = Hq / Hkv, D head size, I MLP width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_tlt.errors import BackendError
from megatron_tlt.models.inputs import DecoderInput
from megatron_tlt.models.torch.attention import table_slots

TILE = 16
CHUNK = 64
_VECTOR = 16  # elements: a multiple of every CPU's float32 vectors, unrolled twice
_SERIAL = 1 << 15  # elements: PyTorch gives longer elementwise calls to several threads, cut anywhere


@dataclass(slots=True)
class Tile:
    """TILE rows of a batch, the last tile's filled up with rows that write to the scratch slot."""

    token_ids: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    slots: Tensor  # [R] int64, where the rows' own keys and values go
    plan: TilePlan
    used: int  # rows that are not padding


class TilePlan:
    """Attention of one tile: each row over its own list of keys. See `attention.Plan`."""

    def __init__(self, slots: Tensor, lengths: Tensor, max_length: int):
        """`slots` [R, C] are the keys' slots in order of position, `lengths` [R] how many of them count."""
        self._slots = slots.split(CHUNK, 1)
        masked = torch.arange(slots.shape[1], device=slots.device) >= lengths[:, None]
        self._masked = [m[:, None, None] for m in masked.split(CHUNK, 1)]
        assert slots.shape[1] % CHUNK == 0 and max_length <= slots.shape[1]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [R, Hq, D], keys and values [slots, Hkv, D] -> [R, Hq, D]; scores and sums in float32."""
        heads, d = keys.shape[-2:]
        shape = (q.shape[0], heads, q.shape[1] // heads)  # [R, Hkv, G]
        query = (q.float() * d**-0.5).view(-1, shape[2], d)
        scores = []
        for slots, masked in zip(self._slots, self._masked, strict=True):
            found = torch.bmm(query, _chunk(keys, slots).transpose(1, 2)).view(*shape, CHUNK)
            scores.append(found.masked_fill(masked, float("-inf")))
        top = scores[0].amax(-1, keepdim=True)
        for found in scores[1:]:
            top = torch.maximum(top, found.amax(-1, keepdim=True))
        total = torch.zeros_like(top)
        mixed = query.new_zeros(query.shape)
        for found, slots in zip(scores, self._slots, strict=True):
            weights = rowwise(torch.exp, (found - top).view(shape[0], -1)).view(*shape, CHUNK)
            total = total + weights.sum(-1, keepdim=True)
            mixed = mixed + torch.bmm(weights.view(-1, shape[2], CHUNK), _chunk(values, slots))
        return (mixed.view(*shape, d) / total).view(q.shape).to(q.dtype)


def _chunk(cache: Tensor, slots: Tensor) -> Tensor:
    """[slots, Hkv, D] at [R, CHUNK] -> [R * Hkv, CHUNK, D] float32, contiguous and freshly aligned."""
    picked = cache.index_select(0, slots.reshape(-1)).view(*slots.shape, *cache.shape[1:])
    return picked.transpose(1, 2).float().reshape(-1, CHUNK, cache.shape[-1])


def rowwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of [R, n] in calls that PyTorch cuts at the same elements of every row.

    On CPU the elements behind the last full vector of a call, or of a thread's share, take another code path, which
    may round otherwise. A call here is whole rows of whole vectors, short enough for one thread; or else one row.
    """
    width = x.shape[-1]
    if x.device.type != "cpu":
        return function(x)
    rows = max(1, _SERIAL // width) if width % _VECTOR == 0 else 1
    if rows >= x.shape[0]:
        return function(x)
    return torch.cat([function(part.clone()) for part in x.split(rows)])


def tiles(batch: DecoderInput, block_size: int, scratch_slot: int) -> Iterator[Tile]:
    """The batch in tiles, in row order: a row attends to its own tile and earlier ones."""
    total = batch.token_ids.shape[0]
    starts = batch.query_start.tolist()
    owner = [s for s in range(len(starts) - 1) for _ in range(starts[s], starts[s + 1])]
    positions, own = batch.positions.tolist(), batch.slot_mapping.tolist()
    paths = _tree_paths(batch.parents.tolist(), own) if batch.parents is not None else None
    tables, device = batch.block_tables, batch.positions.device
    for begin in range(0, total, TILE):
        rows = list(range(begin, min(begin + TILE, total)))
        fill = TILE - len(rows)
        longest = max(positions[r] for r in rows) + 1
        chunked = -(-longest // CHUNK) * CHUNK
        lengths = torch.tensor([positions[r] + 1 for r in rows] + [1] * fill, device=device)
        mine = torch.tensor([own[r] for r in rows] + [scratch_slot] * fill, device=device)
        at = torch.tensor([owner[r] for r in rows], device=device)
        slots = mine[:, None].repeat(1, chunked)  # a masked key is the row's own: always written, never NaN
        slots[: len(rows), :longest] = table_slots(tables[at], longest, block_size)
        if paths is not None:
            for i, r in enumerate(rows):
                path = paths[r]
                slots[i, positions[r] + 1 - len(path) : positions[r] + 1] = torch.tensor(path, device=device)
        slots = torch.where(torch.arange(chunked, device=device) < lengths[:, None], slots, mine[:, None])
        padded = torch.zeros(TILE, dtype=torch.int64, device=device)
        tokens, where = padded.clone(), padded
        tokens[: len(rows)], where[: len(rows)] = batch.token_ids[rows].long(), batch.positions[rows].long()
        yield Tile(tokens, where, mine, TilePlan(slots, lengths, longest), len(rows))


def _tree_paths(parents: list[int], slots: list[int]) -> list[list[int]]:
    """Slots from each row's first ancestor in the batch down to itself."""
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), slots[row]])
    return paths


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


def check_rows_alike(name: str, function: Callable[[Tensor], Tensor], like: Tensor) -> None:
    """Feeds TILE equal rows as wide as `like`. Raises BackendError if `function` computes them differently."""
    row = torch.randn(1, like.shape[1], generator=torch.Generator().manual_seed(0)).to(like)
    out = function(row.expand(TILE, -1).contiguous())
    if not torch.equal(out, out[:1].expand_as(out)):
        raise BackendError(
            f"rollout.numerics 'invariant': on this machine {name} rounds equal rows of a call differently by their "
            f"place in it ({torch.get_num_threads()} threads); use rollout.kernels 'native', or other rollout.threads"
        )
