"""The drafter's part of a run's checkpoint: only what training changes, written while training goes on.

One safetensors file: tensors under their path in the state ("model/fc.weight"), everything else as JSON in its
metadata, and a SHA-256 over both. No pickle. Drawn, with what waits for what:

    save     wait for the save before; copy to host memory ----> thread: checksum, write, fsync
    (next save, wait) <------------------------------------------ its end, or its error

The file is in the scratch directory of a checkpoint, which gets its name when all its files are whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_tlt.drafter.checkpoint import write_tensors
from megatron_tlt.errors import CheckpointError

DRAFTER_STATE = "drafter.safetensors"  # in a checkpoint's directory
_FORMAT = "1"


class AsyncDrafterCheckpoint:
    """Writes states (nested dictionaries of tensors and JSON values) one after the other, in a thread of its own.

    Host memory for one state is kept between saves: new memory costs more than the copy.
    """

    def __init__(self) -> None:
        self._host: dict[str, Tensor] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="drafter-checkpoint")
        self._pending: tuple[Path, Future[None]] | None = None

    def save(self, file: str | Path, state: Mapping[str, Any]) -> None:
        """Copies `state` and returns; `file` is whole after `wait`. Waits for a save under way.

        Raises CheckpointError that names the file if the save before failed, TypeError for a value that is not JSON.
        """
        self.wait()
        tensors: dict[str, Tensor] = {}
        about = json.dumps(_without_tensors(state, "", tensors), sort_keys=True)
        self._snapshot(tensors)
        self._pending = Path(file), self._pool.submit(write_state, Path(file), self._host, about)

    def wait(self) -> None:
        """Returns when the last save is on disk. Raises CheckpointError that names the file if it failed."""
        if self._pending is None:
            return
        (file, writing), self._pending = self._pending, None
        try:
            writing.result()
        except OSError as error:
            raise CheckpointError(f"{file} cannot be written: {error}") from error

    def _snapshot(self, tensors: Mapping[str, Tensor]) -> None:
        host: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            kept = self._host.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            host[name] = kept.copy_(tensor, non_blocking=True)
        if any(t.is_cuda for t in tensors.values()):
            torch.cuda.current_stream().synchronize()
        self._host = host


def write_state(file: Path, tensors: Mapping[str, Tensor], about: str) -> None:
    """Writes tensors and JSON text to the disk. Raises OSError."""
    write_tensors(file, tensors, {"format": _FORMAT, "about": about, "sha256": _digest(tensors, about)})


def load_state(file: str | Path) -> dict[str, Any]:
    """The state that `save` was given, on the CPU. Raises CheckpointError that names a torn, altered or other file."""
    path = Path(file)
    try:
        with safe_open(str(path), "pt") as stored:
            metadata = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if metadata.get("format") != _FORMAT or "about" not in metadata:
        raise CheckpointError(f"{path} is no drafter state of format {_FORMAT}")
    if _digest(tensors, metadata["about"]) != metadata.get("sha256"):
        raise CheckpointError(f"{path} was altered: its checksum does not match")
    state: dict[str, Any] = json.loads(metadata["about"])
    for name, tensor in tensors.items():
        *parents, last = name.split("/")
        place = state
        for part in parents:
            place = place[part]
        place[last] = tensor
    return state


def _without_tensors(state: Mapping[str, Any], path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """`state` without its tensors, which are put into `tensors` under their paths."""
    out: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[path + name] = value.detach().contiguous()
        else:
            is_state = isinstance(value, Mapping)
            out[name] = _without_tensors(value, f"{path}{name}/", tensors) if is_state else value
    return out


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
