"""Reading Hugging Face model directories, one tensor at a time (writing: `hf_writer`).

A single `model.safetensors` or shards with `model.safetensors.index.json`; names and shapes are
checked against the configuration before the first tensor is read. Experts, which are stored one by one, are read into
stacks (see `experts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_tlt.errors import CheckpointError, shortened
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.hf_files import SINGLE, shards


def weight_files(directory: str | Path) -> dict[str, Path]:
    """Stored name -> file, from the index or the single file. Raises CheckpointError naming the missing files."""
    indexed = shards(directory)
    if indexed is not None:
        return indexed
    single = Path(directory) / SINGLE
    with open_tensors(single) as f:
        return dict.fromkeys(f.keys(), single)


def check_weights(directory: str | Path, config: ModelConfig) -> dict[str, Path]:
    """Compares names and shapes on disk with `stored_shapes(config)`; returns stored name -> file.

    A stored `lm_head.weight` of a tied model and rotary buffers are tolerated. Raises CheckpointError
    that names missing, unexpected and misshapen tensors, all at once.
    """
    files, wanted = weight_files(directory), stored_shapes(config)
    problems = []
    if missing := [n for n in wanted if n not in files]:
        problems.append(f"missing: {shortened(missing)}")
    if extra := [n for n in files if n not in wanted and not is_ignorable(n, config)]:
        problems.append(f"unexpected: {shortened(extra)}")
    by_file: dict[Path, list[str]] = {}
    for name, file in files.items():
        if name in wanted:
            by_file.setdefault(file, []).append(name)
    for file, here in sorted(by_file.items()):
        with open_tensors(file) as f:
            stored = set(f.keys())
            if absent := [n for n in here if n not in stored]:
                problems.append(f"in the index but not in {file.name}: {shortened(absent)}")
            for name in here:
                if name in stored and (shape := tuple(f.get_slice(name).get_shape())) != wanted[name]:
                    problems.append(f"{name} has shape {shape}, the configuration says {wanted[name]}")
    if problems:
        listed = shortened(problems, separator="; ")
        raise CheckpointError(f"weights in {directory} do not fit its config.json: {listed}")
    return files


def stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Stored name -> shape of every tensor of a checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in config.parameter_shapes().items():
        stored = config.names_on_disk(name)
        rows = shape if len(stored) == 1 else (prod(shape[:-1]) // len(stored), shape[-1])
        shapes |= dict.fromkeys(stored, rows)
    return shapes


def is_ignorable(name: str, config: ModelConfig) -> bool:
    """Whether some exporters add the tensor and it carries no information."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def weight_reader(directory: str | Path, config: ModelConfig) -> Callable[[str], Tensor]:
    """A function that reads one tensor by its name, as stored. Checks names and shapes first (see `check_weights`)."""
    return tensor_reader(check_weights(directory, config), config)


def tensor_reader(files: Mapping[str, Path], config: ModelConfig) -> Callable[[str], Tensor]:
    """A function that reads one tensor by its name from `files`, stored name -> file; each is mapped once."""
    shapes, opened = config.parameter_shapes(), cache(open_tensors)

    def part(stored: str) -> Tensor:
        return opened(files[stored]).get_tensor(stored)  # type: ignore[no-any-return]

    def read(name: str) -> Tensor:
        first, *others = config.names_on_disk(name)
        if not others:
            return part(first)
        rows = part(first)
        stack = torch.empty(shapes[name], dtype=rows.dtype)
        for target, stored in zip(stack.flatten(0, 1).split(rows.shape[0]), (first, *others), strict=True):
            target.copy_(part(stored))
        return stack

    return read


def iter_weights(directory: str | Path, config: ModelConfig | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, CPU tensor as stored), one in memory at a time, in the model's order.

    Everything is checked before the first tensor is yielded (see `check_weights`).
    """
    config = config or ModelConfig.from_hf(directory)
    read = weight_reader(directory, config)
    for name in config.parameter_shapes():
        yield name, read(name)


def open_tensors(file: Path) -> Any:  # safetensors exports no type for it
    """A safetensors file to read from, as a context manager. Raises CheckpointError if it is none."""
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{file} is not a readable safetensors file: {e}") from e
