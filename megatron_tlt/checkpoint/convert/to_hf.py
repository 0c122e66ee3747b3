"""A Megatron distributed checkpoint as a Hugging Face directory: sharded safetensors, written tensor by tensor.

The source may be ours or another's, of any layout; its config.json lies beside it or is given. Which tensor goes into
which file is planned from the shapes alone, so every rank writes its files alone and every header is right at once.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.actor.checkpoint_files import MANIFEST, find_damage, read_manifest
from megatron_tlt.actor.hf_names import Slot, slots
from megatron_tlt.actor.megatron_dir import MegatronDir
from megatron_tlt.checkpoint.convert.hf_dir import read_hf_config
from megatron_tlt.checkpoint.convert.output import appearing, check_room
from megatron_tlt.checkpoint.convert.ranks import Ranks, together
from megatron_tlt.checkpoint.convert.to_megatron import choose_dtype, with_dtype
from megatron_tlt.checkpoint.export import copy_companions
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.hf_files import INDEX, SINGLE

_DTYPE_WORDS = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Plan:
    """A conversion that can be done: source, configuration, type, and which slots go into which file."""

    source: MegatronDir
    config: ModelConfig
    hf_config: dict[str, Any]
    companions: Path
    dtype: torch.dtype
    files: list[list[Slot]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.config.num_parameters * self.dtype.itemsize

    def name(self, number: int) -> str:
        """A file's name, as `transformers` writes it."""
        count = len(self.files)
        return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def plan(
    megatron: str | Path,
    dtype: str | None,
    config: str | Path | None = None,
    max_file_bytes: int = 4 << 30,
    verify: bool = True,
) -> Plan:
    """Checks everything that can be checked without writing, checksums too. Raises ConfigError, CheckpointError.

    `config` is a Hugging Face directory (or its config.json) for a checkpoint that has none beside it. `dtype` is fp32
    or bf16; None keeps what is stored. `verify` False leaves the files' checksums out.
    """
    source = MegatronDir(megatron)
    found = _find_config(Path(megatron), source.directory, config)
    hf_config = read_hf_config(found)
    model = ModelConfig.from_hf(hf_config)
    source.check(model)
    if verify and (source.directory / MANIFEST).is_file():
        _check_undamaged(source.directory)
    chosen = choose_dtype(source.dtypes(), dtype)
    files = _pack(model, chosen.itemsize, max_file_bytes)
    return Plan(source, model, hf_config, found.parent, chosen, files)


def _find_config(outer: Path, inner: Path, asked: str | Path | None) -> Path:
    if asked is not None:
        given = Path(asked)
        return given if given.suffix == ".json" else given / "config.json"
    for directory in (outer, inner, inner.parent):
        # A run's own config.json, which is no model's, lies two directories above its checkpoints.
        if (directory / "config.json").is_file():
            return directory / "config.json"
    raise CheckpointError(
        f"no config.json beside {inner}: name the model's Hugging Face directory with --config "
        "(for a run of ours, its model.path)"
    )


def _check_undamaged(directory: Path) -> None:
    if damage := find_damage(directory, read_manifest(directory)):
        raise CheckpointError(f"checkpoint {directory} is damaged: {'; '.join(damage)}")


def _pack(config: ModelConfig, itemsize: int, limit: int) -> list[list[Slot]]:
    """Whole slots, in the model's order, into files of up to `limit` bytes (a larger slot has a file of its own)."""
    shapes = config.parameter_shapes()
    files: list[list[Slot]] = [[]]
    held = 0
    for slot in slots(config, 1):
        size = sum(prod(shapes[name]) for name in slot.hf_names) * itemsize
        if files[-1] and held + size > limit:
            files.append([])
            held = 0
        files[-1].append(slot)
        held += size
    return files


def write(todo: Plan, out: Path, ranks: Ranks) -> None:
    """Writes `out`, which must not exist yet. Collective over `ranks`; each writes some of the files."""
    with together(ranks):
        if ranks.is_main:
            check_room(out, todo.num_bytes)
    with appearing(out, ranks) as scratch:
        with together(ranks):
            for number in range(ranks.rank, len(todo.files), ranks.size):
                _write_file(todo, scratch / todo.name(number), todo.files[number])
        if ranks.is_main:
            if len(todo.files) > 1:
                _write_index(todo, scratch)
            copy_companions(todo.companions, scratch)
            text = json.dumps(with_dtype(todo.hf_config, todo.dtype), indent=2) + "\n"
            (scratch / "config.json").write_text(text, encoding="utf-8")


def _write_file(todo: Plan, file: Path, held: list[Slot]) -> None:
    """One safetensors file: 8 bytes of header length, a JSON header, the tensors' bytes one after the other."""
    shapes = todo.config.parameter_shapes()
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in (name for slot in held for name in slot.hf_names):
        begin, end = end, end + prod(shapes[name]) * todo.dtype.itemsize
        header[name] = {
            "dtype": _DTYPE_WORDS[todo.dtype],
            "shape": list(shapes[name]),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for slot in held:
            for name, tensor in zip(slot.hf_names, todo.source.read(todo.config, slot), strict=True):
                _write_tensor(stream, name, tensor, shapes[name], todo.dtype)
        written = stream.tell()
        stream.flush()
        os.fsync(stream.fileno())
    if written != 8 + len(text) + end:
        raise CheckpointError(f"{file}: {written} bytes written, {8 + len(text) + end} planned")


def _write_tensor(stream: Any, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"{name} came out as {tuple(tensor.shape)}, the configuration says {shape}")
    stream.write(tensor.to(dtype).contiguous().view(torch.uint8).numpy().data)


def _write_index(todo: Plan, scratch: Path) -> None:
    weight_map = {
        name: todo.name(number)
        for number, held in enumerate(todo.files)
        for slot in held
        for name in slot.hf_names
    }
    index = {"metadata": {"total_size": todo.num_bytes}, "weight_map": weight_map}
    (scratch / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
