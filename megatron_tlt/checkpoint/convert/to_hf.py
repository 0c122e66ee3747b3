"""A Megatron distributed checkpoint as a Hugging Face directory, one parameter in memory at a time, without megatron.

The source is a run's or another program's, of any layout. What each safetensors file holds follows from the shapes
alone, so every rank writes its files without the others, and every header is final when it is written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.actor.checkpoint_files import damage_of, sync
from megatron_tlt.actor.hf_names import Slot, slots
from megatron_tlt.actor.torch_dist_reader import TorchDistReader
from megatron_tlt.checkpoint.atomic import new_directory
from megatron_tlt.checkpoint.convert.hf_dir import choose_dtype, config_with_dtype, copy_companions
from megatron_tlt.distributed.together import Ranks, together
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.hf_files import INDEX, SINGLE
from megatron_tlt.models.loader import stored_shapes

_DTYPE_WORDS = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Plan:
    """A conversion that was checked: source, the model's config.json, type, and the parameters of each file."""

    source: TorchDistReader
    config_file: Path
    config: ModelConfig
    dtype: torch.dtype
    files: list[list[Slot]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.config.num_parameters * self.dtype.itemsize

    def names_in(self, held: list[Slot]) -> list[str]:
        """The stored tensors of some parameters, in order: of a stack, those of every expert."""
        return [n for slot in held for name in slot.hf_names for n in self.config.names_on_disk(name)]

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
    source = TorchDistReader(megatron)
    file = config_beside(Path(megatron), source) if config is None else Path(config)
    file = file if file.suffix == ".json" else file / "config.json"
    model = ModelConfig.from_hf(file)
    source.check(model)
    if verify and source.manifest() and (damage := damage_of(source.directory)):
        raise CheckpointError(damage)
    chosen = choose_dtype(source.dtypes(), dtype)
    return Plan(source, file, model, chosen, _pack(model, chosen.itemsize, max_file_bytes))


def config_beside(given: Path, source: TorchDistReader) -> Path:
    """The config.json in the directory of a checkpoint or of its shards. Raises CheckpointError if there is none."""
    # Not further up: a run's own config.json, two directories above its checkpoints, describes no model.
    for directory in (given, source.directory, source.directory.parent):
        if (directory / "config.json").is_file():
            return directory / "config.json"
    raise CheckpointError(
        f"no config.json beside {source.directory}: name the model's Hugging Face directory with --config "
        "(for a run of Megatron-TLT, its model.path)"
    )


def _pack(config: ModelConfig, itemsize: int, limit: int) -> list[list[Slot]]:
    """Whole parameters, in the model's order, into files of at most `limit` bytes; a larger one has its own file."""
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
    """Writes `out`, which must not exist yet. Collective: files are shared out over `ranks`."""
    with new_directory(out, todo.num_bytes, ranks) as scratch:
        write_into(todo, scratch, ranks)


def write_into(todo: Plan, scratch: Path, ranks: Ranks) -> None:
    """Writes everything into a directory that is there. Collective."""
    with together(ranks):
        for number in range(ranks.rank, len(todo.files), ranks.size):
            _write_file(todo, scratch / todo.name(number), todo.files[number])
    if ranks.is_main:
        _write_small_files(todo, scratch)


def _write_file(todo: Plan, file: Path, held: list[Slot]) -> None:
    """One safetensors file, as safetensors writes it: header length (8 bytes), JSON header, tensors, by name."""
    shapes = stored_shapes(todo.config)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name in sorted(todo.names_in(held)):
        starts[name], end = end, end + prod(shapes[name]) * todo.dtype.itemsize
        header[name] = {
            "dtype": _DTYPE_WORDS[todo.dtype],
            "shape": list(shapes[name]),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        first = stream.tell()
        for slot in held:
            for name, tensor in zip(slot.hf_names, todo.source.read(todo.config, slot), strict=True):
                stored = todo.config.names_on_disk(name)  # of a stack, those of its experts
                parts = (tensor,) if len(stored) == 1 else tensor.flatten(0, 1).chunk(len(stored))
                for stored_name, part in zip(stored, parts, strict=True):
                    stream.seek(first + starts[stored_name])
                    stream.write(part.to(todo.dtype).contiguous().view(torch.uint8).numpy().data)
    sync(file)


def _write_small_files(todo: Plan, scratch: Path) -> None:
    if len(todo.files) > 1:
        numbered = enumerate(todo.files)
        weight_map = {name: todo.name(n) for n, held in numbered for name in todo.names_in(held)}
        index = {"metadata": {"total_size": todo.num_bytes}, "weight_map": weight_map}
        (scratch / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    copy_companions(todo.config_file.parent, scratch)
    hf_config = json.loads(todo.config_file.read_text(encoding="utf-8"))
    (scratch / "config.json").write_text(config_with_dtype(hf_config, todo.dtype), encoding="utf-8")
