"""Tensors as plain data between two processes, and tensors of it: runs on both sides, with either torch.

Only torch and the standard library are imported. An *entry* is one tensor as plain data: name, dtype, shape, and either
`file` and `offset` (shared memory) or `ipc` (a CUDA handle of the process that trains).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

Entry = Mapping[str, Any]
Sums = dict[str, int]
DEVICE = 6  # the place in a handle's arguments of the device that opens it
IPC_NAMES = (  # of the arguments behind it, in torch's order
    "handle",
    "storage_bytes",
    "storage_offset",
    "requires_grad",
    "counter",
    "counter_offset",
    "event",
    "event_sync",
)


def describe(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Name, dtype and shape of an entry."""
    return {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": [int(n) for n in tensor.shape],
    }


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, row-major, on the host."""
    flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # an array is a buffer


def load_entry(entry: Entry, device: Any, sums: Sums | None) -> torch.Tensor:
    """The tensor of an entry on a device (an index: a CUDA device). Notes its CRC-32 in `sums`. Raises ValueError."""
    rebuild, args = handle_of(entry, sums)
    return rebuild(*args[:DEVICE], device, *args[DEVICE + 1 :])


def handle_of(entry: Entry, sums: Sums | None) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """(function, arguments) that rebuild a tensor, the form that the engine's `update_weights` takes.

    Calling it notes the tensor's CRC-32 in `sums`. Raises ValueError.
    """
    rebuild = _from_ipc if "ipc" in entry else _from_host
    args = _ipc_args(entry) if "ipc" in entry else (entry, *[None] * DEVICE)

    def load(*given: Any) -> torch.Tensor:
        tensor = rebuild(*given)
        if sums is not None:
            sums[entry["name"]] = zlib.crc32(tensor_bytes(tensor))
        return tensor

    return load, args


def _from_host(entry: Entry, *rest: Any) -> torch.Tensor:
    with open(entry["file"], "rb") as file:
        file.seek(entry["offset"])
        data = file.read(_num_bytes(entry))
    if len(data) != _num_bytes(entry):
        raise ValueError(f"{entry['name']}: {len(data)} bytes came for {entry['dtype']} {entry['shape']}")
    shape = entry["shape"]
    if not data:
        return torch.empty(shape, dtype=_dtype(entry), device=_device(rest[-1]))
    flat = torch.frombuffer(bytearray(data), dtype=_dtype(entry))
    return flat.view(shape).to(_device(rest[-1]))


def _from_ipc(*args: Any) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    return rebuild_cuda_tensor(*args)  # type: ignore[no-any-return, no-untyped-call]


def _ipc_args(entry: Entry) -> tuple[Any, ...]:
    """The arguments of torch's `rebuild_cuda_tensor`, from the plain data of `transport.ipc_entry`."""
    ipc = entry["ipc"]
    head = (torch.Tensor, torch.Size(entry["shape"]), tuple(ipc["stride"]), ipc["offset"])
    storage = (torch.storage.TypedStorage, _dtype(entry), None)  # type: ignore[attr-defined]
    return (*head, *storage, *(ipc[name] for name in IPC_NAMES))


def _dtype(entry: Entry) -> torch.dtype:
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['name']}: no such dtype: {entry['dtype']!r}")
    return dtype


def _num_bytes(entry: Entry) -> int:
    count: int = torch.Size(entry["shape"]).numel()
    return count * _dtype(entry).itemsize


def _device(device_id: Any) -> torch.device:
    return torch.device("cuda", device_id) if isinstance(device_id, int) else torch.device(device_id)
