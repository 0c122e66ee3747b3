"""Tensors that another process has sent: runs in the engine's environment, with its torch.

Only torch, safetensors and the standard library are imported. A message says where tensors lie: `{"file": path}`, a
safetensors file in shared memory, or `{"ipc": {name: arguments}}`, CUDA handles of the process that trains
(`transport.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

Location = Mapping[str, Any]
Sums = dict[str, int]
DEVICE = 6  # the place in the arguments of torch's `rebuild_cuda_tensor` of the device that opens it


def load_tensors(location: Location, device: int | torch.device) -> dict[str, torch.Tensor]:
    """The tensors by name on a device (an index: a CUDA device); those of handles lie in the sender's memory and need
    an index.
    """
    if "file" in location:
        at = torch.device("cuda", device) if isinstance(device, int) else device
        tensors = load(Path(location["file"]).read_bytes())
        return {name: tensor.to(at) for name, tensor in tensors.items()}
    return {name: _from_ipc(arguments, device) for name, arguments in location["ipc"].items()}


def checksums(tensors: Mapping[str, torch.Tensor]) -> Sums:
    """CRC-32 of each tensor's bytes, row-major."""
    found = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        found[name] = zlib.crc32(flat.numpy().data)
    return found


def _from_ipc(arguments: list[Any], device: int | torch.device) -> torch.Tensor:
    """Calls torch's `rebuild_cuda_tensor` with the plain data of `transport.ipc_arguments`."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    size, stride, offset, dtype, *rest = arguments
    storage = (torch.storage.TypedStorage, getattr(torch, dtype), device)
    tensor: torch.Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor, torch.Size(size), tuple(stride), offset, *storage, *rest
    )
    return tensor
