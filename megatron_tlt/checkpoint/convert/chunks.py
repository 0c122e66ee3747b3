"""Which pieces of Hugging Face tensors make which chunk of Megatron's checkpoint, for any TP x PP. No files here.

A chunk is what one TP rank of one stage holds of one parameter, cut as megatron-core cuts it when it saves:

    replicated   one chunk, written by TP rank 0
    vocab        rows; the last ranks' rows are padded with zeros to a multiple of tp
    columns      columns
    qkv          rows, by key/value group: [its query heads, its key, its value] of each group
    gate_up      two chunks: a TP rank's gate rows, and its up rows after all gate rows

All layers share one tensor [layers, ...] under a key without the layer's number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from megatron_tlt.actor.hf_names import Slot, shard, slots
from megatron_tlt.errors import ConfigError, ConfigProblem
from megatron_tlt.models.config import ModelConfig

_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_MG_LAYER = re.compile(r"^decoder\.layers\.\d+\.")

# Layers of megatron save an (empty) extra state, which Transformer Engine fills with FP8 scales; a reader expects it.
EXTRA_STATES = tuple(
    f"{module}._extra_state"
    for module in (
        "self_attention.linear_proj",
        "self_attention.linear_qkv",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    )
)


@dataclass(frozen=True)
class Piece:
    """Rows (dim 0) or columns (dim 1) `start:stop` of a Hugging Face tensor."""

    name: str
    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """A block of a stored tensor `key` of shape `size`: where it begins, how big it is, what it is made of."""

    key: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    stage: int
    tp_rank: int

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return prod(self.shape)


def check_layout(config: ModelConfig, tp: int, pp: int) -> None:
    """Raises ConfigError with everything that `tp` and `pp` do not divide."""
    problems = [
        ConfigProblem(option, value, f"must divide {what} ({number})")
        for option, value, what, number in (
            ("--tp", tp, "the query heads", config.num_heads),
            ("--tp", tp, "the key/value heads", config.num_kv_heads),
            ("--tp", tp, "the MLP width", config.intermediate_size),
            ("--pp", pp, "the layers", config.num_layers),
        )
        if number % value
    ]
    if problems:
        raise ConfigError(problems)


def chunks(config: ModelConfig, tp: int, pp: int) -> Iterator[Chunk]:
    """Every chunk of the model at this layout, stage by stage, in the model's order."""
    for slot in slots(config, pp):
        if slot.exported:
            yield from _chunks_of(config, slot, tp)


def _chunks_of(config: ModelConfig, slot: Slot, tp: int) -> Iterator[Chunk]:
    shapes = config.parameter_shapes()
    full = [shapes[name] for name in slot.hf_names]
    match = _HF_LAYER.match(slot.hf_names[0])
    layer = None if match is None else int(match[1])
    key = _MG_LAYER.sub("decoder.layers.", slot.paths[-1])

    def chunk(rank: int, size: tuple[int, ...], dim: int, start: int, length: int, *pieces: Piece) -> Chunk:
        offsets = tuple(start if d == dim else 0 for d in range(len(size)))
        shape = tuple(length if d == dim else s for d, s in enumerate(size))
        if layer is not None:
            size, offsets, shape = (config.num_layers, *size), (layer, *offsets), (1, *shape)
        return Chunk(key, size, offsets, shape, pieces, slot.stage, rank)

    name, shape = slot.hf_names[0], full[0]
    size: tuple[int, ...]
    if slot.kind == "replicated":
        yield chunk(0, shape, 0, 0, shape[0], Piece(name, 0, 0, shape[0]))
        return
    for rank in range(tp):
        if slot.kind == "vocab":
            rows, last = -(-shape[0] // tp), shape[0]
            piece = Piece(name, 0, min(rank * rows, last), min((rank + 1) * rows, last))
            yield chunk(rank, (rows * tp, shape[1]), 0, rank * rows, rows, piece)
        elif slot.kind == "columns":
            width = shape[1] // tp
            yield chunk(rank, shape, 1, rank * width, width, Piece(name, 1, rank * width, (rank + 1) * width))
        elif slot.kind == "gate_up":
            rows, size = shape[0] // tp, (2 * shape[0], shape[1])
            for half, source in enumerate(slot.hf_names):
                piece = Piece(source, 0, rank * rows, (rank + 1) * rows)
                yield chunk(rank, size, 0, half * shape[0] + rank * rows, rows, piece)
        else:
            cut = [s[0] // tp for s in full]
            size = (sum(s[0] for s in full), *shape[1:])
            parts = [Piece(n, 0, rank * c, (rank + 1) * c) for n, c in zip(slot.hf_names, cut)]
            yield chunk(rank, size, 0, rank * sum(cut), sum(cut), *parts)


def build(
    config: ModelConfig, chunk: Chunk, tp: int, read: Callable[[Piece], Tensor], dtype: torch.dtype
) -> Tensor:
    """The chunk's numbers. Memory: its pieces, and itself."""
    parts = [read(piece) for piece in chunk.pieces]
    if len(parts) > 1:
        # A TP rank's query, key and value rows are those of a model with so many fewer heads, uncut.
        mine = replace(config, num_heads=config.num_heads // tp, num_kv_heads=config.num_kv_heads // tp)
        slot = Slot(tuple(piece.name for piece in chunk.pieces), (), 0, "qkv")
        parts = [shard(mine, slot, parts, 0, 1)]
    made = torch.empty(chunk.shape, dtype=dtype)
    flat, found = made.view(-1), parts[0].reshape(-1)
    flat[: found.numel()] = found  # copied, and rounded, into memory of its own
    flat[found.numel() :] = 0
    return made
