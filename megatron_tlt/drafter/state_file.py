"""The drafter's file of a run's checkpoint: only what training changes.

One safetensors file: tensors under their path in the state ("model/fc.weight"), everything else as JSON in its
metadata, and a SHA-256 over both. No pickle. `StateSnapshot.take` copies the state; the thread that writes the
policy's shards (`actor/shard_writer.py`) calls what it returns, while training goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.hf_writer import write_tensors

DRAFTER_STATE = "drafter.safetensors"  # in a checkpoint's directory
_FORMAT = "1"


class StateSnapshot:
    """Copies states (nested dictionaries of tensors and JSON values) to host memory, for one save at a time.

    The memory is kept between saves: new memory costs more than the copy.
    """

    def __init__(self) -> None:
        self._host: dict[str, Tensor] = {}

    def take(self, state: Mapping[str, Any]) -> Callable[[Path], None]:
        """Copies `state`; returns what writes the copy as a file and may raise OSError. Call it before the next `take`.

        Raises TypeError for a value that is not JSON.
        """
        tensors: dict[str, Tensor] = {}
        about = json.dumps(_without_tensors(state, "", tensors), sort_keys=True)
        host: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            kept = self._host.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            host[name] = kept.copy_(tensor, non_blocking=True)
        if any(t.is_cuda for t in tensors.values()):
            torch.cuda.current_stream().synchronize()
        self._host = host
        return lambda file: write_state(file, host, about)


def write_state(file: Path, tensors: Mapping[str, Tensor], about: str) -> None:
    """Writes tensors and JSON text to the disk. Raises OSError."""
    write_tensors(file, tensors, {"format": _FORMAT, "about": about, "sha256": _digest(tensors, about)})


def load_state(file: str | Path) -> dict[str, Any]:
    """The state that was saved, on the CPU. Raises CheckpointError that names a torn, altered or other file."""
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
