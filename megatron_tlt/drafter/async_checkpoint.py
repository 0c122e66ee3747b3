"""The drafter's part of a run's checkpoint: only what training changes, written while training goes on.

One safetensors file: tensors under their path in the state ("model/fc.weight"), everything else as JSON in its
metadata, and a SHA-256 over both. No pickle. Drawn, with who waits for whom:

    save     wait for the save before; copy to host memory ----> thread: checksum, write, fsync, rename, fsync
    (next save, wait) <------------------------------------------ its end, or its error
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_tlt.errors import CheckpointError

DRAFTER_STATE = "drafter.safetensors"  # in a checkpoint's directory
_FORMAT = 1
_Flat = dict[str, Tensor]


class AsyncDrafterCheckpoint:
    """Writes states (nested maps of tensors and JSON values) one after the other, in a thread of its own.

    Host memory for one state is kept between saves: new memory costs more than the copy.
    """

    def __init__(self) -> None:
        self._host: _Flat = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="drafter-checkpoint")
        self._pending: tuple[Path, Future[None]] | None = None

    def save(self, file: str | Path, state: Mapping[str, Any]) -> None:
        """Copies `state` and returns; the file appears, whole, at some later time. Waits for a save under way.

        Raises CheckpointError that names the file if the save before failed, or for a value that cannot be kept.
        """
        self.wait()
        target = Path(file)
        tensors: _Flat = {}
        about = _split(state, "", tensors, target)
        self._snapshot(tensors)
        self._pending = target, self._pool.submit(write_state, target, self._host, about)

    def is_done(self) -> bool:
        """Whether nothing is being written (or it failed: `wait` says so)."""
        return self._pending is None or self._pending[1].done()

    def wait(self) -> None:
        """Returns when the last save is on disk. Raises CheckpointError that names the file if it failed."""
        if self._pending is None:
            return
        (file, writing), self._pending = self._pending, None
        try:
            writing.result()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be written: {error}") from error

    def _snapshot(self, tensors: _Flat) -> None:
        host: _Flat = {}
        for name, tensor in tensors.items():
            kept = self._host.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            host[name] = kept.copy_(tensor, non_blocking=True)
        if any(t.is_cuda for t in tensors.values()):
            torch.cuda.current_stream().synchronize()
        self._host = host


def write_state(file: Path, tensors: _Flat, about: Any) -> None:
    """Writes tensors and JSON value; an older file is replaced when the new one is on disk. Raises OSError."""
    text = json.dumps(about, sort_keys=True)
    scratch = file.with_name(f".{file.name}.saving")
    metadata = {"format": str(_FORMAT), "about": text, "sha256": _digest(tensors, text)}
    try:
        save_file(tensors, str(scratch), metadata=metadata)
        scratch.chmod(_mode(scratch.parent))  # safetensors makes its files private
        with scratch.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(scratch, file)
    finally:
        scratch.unlink(missing_ok=True)
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _mode(directory: Path) -> int:
    """What a new file in `directory` gets: the umask cannot be read without being set, for all threads."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        probe = Path(folder) / "probe"
        probe.touch()
        return probe.stat().st_mode & 0o777


def load_state(file: str | Path) -> dict[str, Any]:
    """The state that `save` was given, on the CPU. Raises CheckpointError that names a torn, altered or other file."""
    path = Path(file)
    try:
        with safe_open(str(path), "pt") as stored:
            metadata = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if metadata.get("format") != str(_FORMAT) or "about" not in metadata:
        raise CheckpointError(f"{path} is no drafter state of format {_FORMAT}")
    if _digest(tensors, metadata["about"]) != metadata.get("sha256"):
        raise CheckpointError(f"{path} was altered: its checksum does not match")
    state: dict[str, Any] = json.loads(metadata["about"])
    for name, tensor in tensors.items():
        *path_to, last = name.split("/")
        place = state
        for part in path_to:
            place = place[part]
        place[last] = tensor
    return state


def _split(value: Any, path: str, tensors: _Flat, file: Path) -> Any:
    """Moves the tensors below `value` into `tensors`; the rest, as JSON can hold it."""
    if isinstance(value, Mapping):
        out = {}
        for name, item in value.items():
            if not isinstance(name, str) or "/" in name:
                raise CheckpointError(
                    f"{file}: {path or 'the state'} has the key {name!r}: only text without /"
                )
            inner = f"{path}/{name}" if path else name
            if isinstance(item, Tensor):
                tensors[inner] = item.detach().contiguous()
            else:
                out[name] = _split(item, inner, tensors, file)
        return out
    if isinstance(value, list | tuple):
        return [_split(item, f"{path}[{i}]", tensors, file) for i, item in enumerate(value)]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise CheckpointError(f"{file}: {path} is a {type(value).__name__}: only tensors in maps and JSON values")


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
