"""The drafter's file of a run's checkpoint: only what training changes.

One safetensors file: tensors under their path in the state ("model/fc.weight"), everything else as JSON in its
metadata. No pickle. The checkpoint's manifest has its checksum, and the thread that writes the policy's shards
(`actor/shard_writer.py`) writes it, too, while training goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.hf.writer import write_tensors

DRAFTER_STATE = "drafter.safetensors"  # in a checkpoint's directory


def drafter_state_writer(state: Mapping[str, Any]) -> Callable[[Path], None]:
    """A function that writes `state`, a nested dictionary of tensors and JSON values, as a file; it may raise OSError.

    Tensors in the host's memory must not change until it is written. Raises TypeError for a value that is not JSON.
    """
    tensors: dict[str, Tensor] = {}
    about = json.dumps(_without_tensors(state, "", tensors), sort_keys=True)
    return lambda file: write_tensors(file, tensors, {"about": about})


def load_drafter_state(file: str | Path, with_tensors: bool = True) -> dict[str, Any]:
    """The state that was saved, on the CPU; without `with_tensors` its JSON values only.

    Raises CheckpointError that names a torn or other file.
    """
    path = Path(file)
    try:
        with safe_open(str(path), "pt") as stored:
            metadata = stored.metadata() or {}
            names = stored.keys() if with_tensors else ()
            tensors = {name: stored.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if "about" not in metadata:
        raise CheckpointError(f"{path} is no drafter state")
    state: dict[str, Any] = json.loads(metadata["about"])
    for name, tensor in tensors.items():
        *parents, last = name.split("/")
        place = state
        for part in parents:
            place = place[part]
        place[last] = tensor
    return state


def _without_tensors(state: Mapping[str, Any], path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """`state` without its tensors, which are put into `tensors` under their paths, in the host's memory."""
    out: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[path + name] = value.detach().cpu().contiguous()
        else:
            is_state = isinstance(value, Mapping)
            out[name] = _without_tensors(value, f"{path}{name}/", tensors) if is_state else value
    return out
