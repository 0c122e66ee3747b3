"""A Megatron distributed checkpoint as a Hugging Face directory, one parameter in memory at a time, without megatron.

The source is a run's or another program's, of any layout. The contents of each safetensors file follow from the shapes
alone, so every rank writes its files without the others, and every header is final when it is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from megatron_tlt.actor.checkpoint_files import damage_of
from megatron_tlt.actor.hf_names import Slot, slots
from megatron_tlt.actor.torch_dist_reader import TorchDistReader
from megatron_tlt.checkpoint.atomic import new_directory
from megatron_tlt.checkpoint.companions import copy_companions
from megatron_tlt.checkpoint.convert.adapted import AdaptedReader
from megatron_tlt.checkpoint.convert.hf_dir import choose_dtype
from megatron_tlt.config.json_reader import read_object
from megatron_tlt.distributed.together import Ranks, together
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.writer import TensorFile, config_with_dtype, split_into_files, weight_file_name, write_index
from megatron_tlt.observe.files import naming

COMMAND = "convert_megatron_to_hf"


@dataclass(frozen=True)
class HfConversion:
    """A checked conversion to Hugging Face: source, the model's config.json, type, and the parameters of each file."""

    source: TorchDistReader | AdaptedReader
    config_file: Path
    config: ModelConfig
    dtype: torch.dtype
    files: list[list[Slot]]

    @classmethod
    def plan(
        cls,
        megatron: str | Path | AdaptedReader,
        dtype: str | None,
        config: str | Path | None = None,
        max_file_bytes: int = 4 << 30,
        verify: bool = True,
        part: int = 0,
        parts: int = 1,
    ) -> HfConversion:
        """Checks everything that can be checked without writing, checksums too. Raises ConfigError, CheckpointError.

        `config` is a Hugging Face directory (or its config.json) for a checkpoint that has none beside it. `dtype` is
        fp32 or bf16; None keeps what is stored. `verify` False leaves the files' checksums out; else those of every
        `parts`-th file are compared, as in `damage_of`.
        """
        source = megatron if isinstance(megatron, AdaptedReader) else TorchDistReader(megatron)
        given = source.directory if isinstance(megatron, AdaptedReader) else Path(megatron)
        file = config_beside(given, source.directory) if config is None else config_file(config)
        model = ModelConfig.from_hf(file)
        source.check(model)
        if verify and source.manifest() and (damage := damage_of(source.directory, part, parts)):
            raise CheckpointError(damage)
        chosen = choose_dtype(source.dtypes(), dtype)
        groups, shapes = slots(model, 1), model.parameter_shapes()
        sizes = [sum(prod(shapes[name]) for name in slot.hf_names) * chosen.itemsize for slot in groups]
        files = [[groups[number] for number in held] for held in split_into_files(sizes, max_file_bytes)]
        return cls(source, file, model, chosen, files)

    @property
    def sources(self) -> list[Path]:
        """The directories that are read."""
        return [self.source.directory, self.config_file.parent]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.config.num_parameters * self.dtype.itemsize

    @property
    def names(self) -> list[list[str]]:
        """Parameters by file, in order."""
        return [[name for slot in held for name in slot.hf_names] for held in self.files]

    def name(self, number: int) -> str:
        """A file's name."""
        return weight_file_name(number, len(self.files))

    def write(self, out: Path, ranks: Ranks, overwrite: bool = False) -> None:
        """Writes `out`; with `overwrite` it replaces an older conversion. Collective: `ranks` share the files."""
        with new_directory(out, COMMAND, self.num_bytes, ranks, overwrite, self.sources) as scratch:
            self.write_into(scratch, ranks)

    def write_into(self, scratch: Path, ranks: Ranks) -> None:
        """Writes everything into a directory that all ranks see. Collective. Raises CheckpointError."""
        with together(ranks):
            if not scratch.is_dir():
                seen = f"rank {ranks.rank} does not see {scratch.parent}"
                raise CheckpointError(f"{seen}: write to a directory that all nodes share, or on one node")
            for number in range(ranks.rank, len(self.files), ranks.size):
                path = scratch / self.name(number)
                with naming(path), TensorFile(path, self.config, self.names[number], self.dtype) as file:
                    for slot in self.files[number]:
                        for name, tensor in zip(slot.hf_names, self.source.read(self.config, slot), strict=True):
                            file.write(name, tensor)
        if ranks.is_main:
            _write_small_files(self, scratch)


def config_file(config: str | Path) -> Path:
    """The config.json that is named itself, or by its directory."""
    path = Path(config)
    return path if path.suffix == ".json" else path / "config.json"


def config_beside(given: Path, shards: Path) -> Path:
    """The config.json in the directory of a checkpoint or of its shards. Raises CheckpointError if there is none."""
    # Not further up: a run's own config.json, two directories above its checkpoints, describes no model.
    for directory in (given, shards, shards.parent):
        if (directory / "config.json").is_file():
            return directory / "config.json"
    raise CheckpointError(
        f"no config.json beside {shards}: name the model's Hugging Face directory with --config "
        "(for a run of Megatron-TLT, its model.path)"
    )


def _write_small_files(todo: HfConversion, scratch: Path) -> None:
    write_index(scratch, todo.config, todo.names, todo.num_bytes)
    copy_companions(todo.config_file.parent, scratch)
    text = config_with_dtype(read_object(todo.config_file), todo.dtype)
    (scratch / "config.json").write_text(text, encoding="utf-8")
