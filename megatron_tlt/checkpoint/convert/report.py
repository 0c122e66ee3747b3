"""What a conversion would do, as text: every parameter's names and shapes, every file's size. Reads no tensor."""

from __future__ import annotations

import re
import shutil
from itertools import groupby
from math import prod
from pathlib import Path

from megatron_tlt.actor.hf_names import slots
from megatron_tlt.checkpoint.convert import to_hf, to_megatron
from megatron_tlt.checkpoint.convert.chunks import Chunk
from megatron_tlt.checkpoint.convert.output import gib
from megatron_tlt.checkpoint.convert.to_megatron import dtype_name
from megatron_tlt.models.config import ModelConfig

_LAYER = re.compile(r"\.layers\.\d+\.")


def megatron_report(todo: to_megatron.Plan, out: Path) -> str:
    """The mapping from Hugging Face names to Megatron tensors, and what each rank's file will hold."""
    source = todo.source
    lines = [
        f"{source.directory} -> {out}: {_model(source.config)}, {dtype_name(todo.dtype)}, {_layout(todo)}",
        "",
    ]
    by_key: dict[str, list[Chunk]] = {}
    for chunk in todo.chunks:
        by_key.setdefault(chunk.key, []).append(chunk)
    for key, held in by_key.items():
        names = dict.fromkeys(_short(piece.name) for chunk in held for piece in chunk.pieces)
        each = f"{len(held)} chunks of {list(held[0].shape)}"
        size = gib(prod(held[0].size) * todo.dtype.itemsize)
        lines.append(f"{', '.join(names)}\n    -> {key} {list(held[0].size)}, {each}, {size}")
    if source.ignored:
        lines.append(f"not converted, they carry nothing: {', '.join(source.ignored)}")
    lines.append("")
    for number in range(todo.tp * todo.pp):
        held = [c for c in todo.chunks if c.stage * todo.tp + c.tp_rank == number]
        size = gib(sum(c.numel for c in held) * todo.dtype.itemsize)
        where = f"stage {number // todo.tp}, tensor rank {number % todo.tp}"
        lines.append(f"release/__{number}_0.distcp  {where}: {len(held)} chunks, {size}")
    return "\n".join([*lines, _total(todo.num_bytes, out)])


def hf_report(todo: to_hf.Plan, out: Path) -> str:
    """The mapping from Megatron tensors to Hugging Face names, and what each file will hold."""
    source, shapes = todo.source, todo.config.parameter_shapes()
    lines = [f"{source.directory} -> {out}: {_model(todo.config)}, {dtype_name(todo.dtype)}", ""]
    found = [(tuple(stored.key for stored in source.find(slot)), slot) for slot in slots(todo.config, 1)]
    for keys, group in groupby(sorted(found, key=lambda pair: pair[0]), key=lambda pair: pair[0]):
        held = [slot for _, slot in group]
        stored = ", ".join(f"{_short(key)} {list(source.tensors[key].size)}" for key in keys)
        lines.append(stored)
        lines += [f"    -> {_short(name)} {list(shapes[name])} x {len(held)}" for name in held[0].hf_names]
    lines.append("")
    for number, some in enumerate(todo.files):
        names = [name for slot in some for name in slot.hf_names]
        size = gib(sum(prod(shapes[name]) for name in names) * todo.dtype.itemsize)
        lines.append(f"{todo.name(number)}  {len(names)} tensors, {size}")
    return "\n".join([*lines, _total(todo.num_bytes, out)])


def _short(name: str) -> str:
    return _LAYER.sub(".layers.*.", name)


def _model(config: ModelConfig) -> str:
    tied = ", tied embeddings" if config.tie_word_embeddings else ""
    return f"{config.family}, {config.num_layers} layers, {config.num_parameters:,} parameters{tied}"


def _layout(todo: to_megatron.Plan) -> str:
    padded = -(-todo.source.config.vocab_size // todo.tp) * todo.tp
    rows = todo.source.config.vocab_size
    grown = f", vocabulary {rows} padded to {padded}" if padded != rows else ""
    return f"tp {todo.tp} x pp {todo.pp}{grown}"


def _total(num_bytes: int, out: Path) -> str:
    parent = out.parent
    free = f", {gib(shutil.disk_usage(parent).free)} free in {parent.resolve()}" if parent.is_dir() else ""
    return f"total {gib(num_bytes)}{free}"
