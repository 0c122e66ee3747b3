"""Hugging Face model directories: reading weights one tensor at a time, and writing them.

Reading: a single `model.safetensors` or shards with `model.safetensors.index.json`; names and shapes are
checked against the configuration before the first tensor is read. Experts, which are stored one by one, are read into
stacks and written apart (see `experts`). Writing is atomic per directory entry: shards go to a temporary directory
first, and config.json, which makes the directory a model, is moved last.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_tlt.errors import CheckpointError, shortened
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.hf_files import INDEX, SINGLE, shards


def weight_files(directory: str | Path) -> dict[str, Path]:
    """Stored name -> file, from the index or the single file. Raises CheckpointError naming what is missing."""
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
    """Tensors that some exporters add and that carry no information."""
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
    """Yields (name, CPU tensor as stored), one in memory at a time, in file order.

    Everything is checked before the first tensor is yielded (see `check_weights`).
    """
    config = config or ModelConfig.from_hf(directory)
    files = check_weights(directory, config)
    by_file: dict[Path, list[str]] = {}
    for name in config.parameter_shapes():
        by_file.setdefault(files[config.names_on_disk(name)[0]], []).append(name)
    read = tensor_reader(files, config)
    for names in by_file.values():
        for name in names:
            yield name, read(name)


def save_hf(
    directory: str | Path,
    config: ModelConfig,
    named_tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Writes safetensors (sharded above `max_shard_bytes`), the index if sharded, and config.json.

    Holds one shard in memory. An existing model in `directory` is replaced only once the new one is
    complete on disk; other files there (tokenizer, ...) stay. Raises CheckpointError on missing, extra or
    misshapen tensors.
    """
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".saving-", dir=target))
    try:
        shards = _write_shards(scratch, config, named_tensors, dtype, max_shard_bytes)
        names = _name_shards(scratch, shards)
        config_file = scratch / "config.json"
        config_file.write_text(json.dumps(config.to_hf(str(dtype).removeprefix("torch.")), indent=2) + "\n")
        mode = config_file.stat().st_mode  # the umask's; safetensors makes its files private
        for file in scratch.iterdir():
            file.chmod(mode)
            _fsync(file)
        _replace(scratch, target, names)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_shards(
    scratch: Path, config: ModelConfig, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype, limit: int
) -> list[dict[str, int]]:
    """Writes shard-0, shard-1, ...; returns for each its tensors' names and bytes."""
    wanted, seen = config.parameter_shapes(), set()
    shards: list[dict[str, int]] = []
    pending: dict[str, Tensor] = {}
    held = 0

    def flush() -> None:
        nonlocal held
        if pending:
            save_file(pending, str(scratch / f"shard-{len(shards)}"), metadata={"format": "pt"})
            shards.append({n: t.nbytes for n, t in pending.items()})
            pending.clear()
            held = 0

    for name, tensor in named:
        if is_ignorable(name, config):
            continue
        if tuple(tensor.shape) != wanted.get(name):
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)}, the configuration says {wanted.get(name)}"
            )
        whole = tensor.detach().to("cpu", dtype).contiguous()
        whole = whole.clone() if whole.data_ptr() == tensor.data_ptr() else whole
        stored = config.names_on_disk(name)
        parts = (whole,) if len(stored) == 1 else whole.flatten(0, 1).chunk(len(stored))
        for stored_name, part in zip(stored, parts, strict=True):
            if pending and held + part.nbytes > limit:
                flush()
            pending[stored_name] = part
            held += part.nbytes
        seen.add(name)
    flush()
    if missing := [n for n in wanted if n not in seen]:
        raise CheckpointError(f"cannot save {scratch.parent}: missing {shortened(missing)}")
    return shards


def _name_shards(scratch: Path, shards: list[dict[str, int]]) -> list[str]:
    """Gives shards their final names and writes the index if there are several; returns the file names."""
    if len(shards) == 1:
        (scratch / "shard-0").rename(scratch / SINGLE)
        return [SINGLE]
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, name in enumerate(names):
        (scratch / f"shard-{i}").rename(scratch / name)
    total = sum(sum(s.values()) for s in shards)
    weight_map = {tensor: file for file, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (scratch / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return [*names, INDEX]


def _replace(scratch: Path, target: Path, names: list[str]) -> None:
    """Takes the old config.json away, moves the weights in, removes stale shards, moves config.json in last.

    A crash in between leaves a directory without config.json, which is refused when read, never a mixture.
    """
    (target / "config.json").unlink(missing_ok=True)
    for stale in [*target.glob("*.safetensors"), target / INDEX]:
        if stale.name not in names:
            stale.unlink(missing_ok=True)
    for name in [*names, "config.json"]:
        os.replace(scratch / name, target / name)
    _fsync(target)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_tensors(file: Path) -> Any:  # safetensors exports no type for it
    """A safetensors file to read from, as a context manager. Raises CheckpointError if it is none."""
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{file} is not a readable safetensors file: {e}") from e
