"""Reading Hugging Face model directories, one tensor at a time (writing: `hf_writer`).

Files, names, shapes and types are checked before the first tensor is read (`hf_files`). Experts, which are stored one
by one, are read into stacks (see `experts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.files import check_weights


def weight_reader(directory: str | Path, config: ModelConfig) -> Callable[[str], Tensor]:
    """A function that reads one tensor by its name, as stored. Checks all of them first (see `check_weights`)."""
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
