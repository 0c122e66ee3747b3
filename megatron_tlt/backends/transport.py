"""How tensors reach the engine's process, as configured: GPU memory handles or shared memory.

An entry describes one tensor as plain data (see `entries.py`). A tensor's memory must stay as it is until the
call that names it has been answered, and of a drafter until the push is finished.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megatron_tlt.backends.entries import DEVICE, IPC_NAMES, describe, tensor_bytes
from megatron_tlt.errors import ConfigError, SyncError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.backends.process import EngineProcess

Named = tuple[str, "Tensor"]
# A CUDA memory handle as torch's allocator writes it: a byte with the format's version, a byte with the kind of memory,
# and the driver's own bytes. Handles without the two are older than both.
_DRIVER_BYTES = 64
_PLAIN, _EXPANDABLE = ord("c"), ord("e")  # memory of cudaMalloc; of an expandable segment
_VERSION = 2  # the newest that torch <= 2.12 reads; 2.13 writes 3, with the same bytes for plain memory
_SHARED = Path("/dev/shm")
_ALIGNMENT = 256  # bytes; a tensor's place in a packed buffer


class Transport(Protocol):
    """Carries tensors into the open push."""

    def send(self, version: int, tensors: Sequence[Named], drafter: bool = False) -> None:
        """Sends full tensors; returns when the engine has them. Raises BackendError, SyncError."""

    def finish(self) -> None:
        """Frees what the engine read from; the push is over."""

    def close(self) -> None:
        """Frees everything."""


def open_transport(name: str, process: EngineProcess) -> Transport:
    """The transport of that name. Raises ConfigError where this machine has no such thing."""
    if name == "shared_memory":
        if not _SHARED.is_dir():
            raise ConfigError.of(f"{process.launch.section}.transport", name, f"needs {_SHARED}")
        return SharedMemoryTransport(process)
    if not torch.cuda.is_available():
        raise ConfigError.of(f"{process.launch.section}.transport", name, "needs CUDA: use shared_memory")
    return CudaIpcTransport(process)


class SharedDirectory:
    """A directory in shared memory, private to this user, that a later job removes if this process could not."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="tlt-", dir=_SHARED)
        self.path = Path(self._directory.name)
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # shows a later job that this process lives

    def close(self) -> None:
        """Removes it. A second call does nothing."""
        self._directory.cleanup()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


class SharedMemoryTransport:
    """A file in /dev/shm for each call, which the engine's workers read."""

    def __init__(self, process: EngineProcess):
        self._process = process
        self._directory = SharedDirectory()
        self._held: list[Path] = []
        self._count = 0

    def send(self, version: int, tensors: Sequence[Named], drafter: bool = False) -> None:
        """See `Transport`."""
        path = self._directory.path / str(self._count)
        self._count += 1
        entries = []
        self._held.append(path)  # also a file that could not be written to its end is removed
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for name, tensor in tensors:
                entries.append({**describe(name, tensor), "file": str(path), "offset": file.tell()})
                file.write(tensor_bytes(tensor))
        self._process.call("weights", version=version, entries=entries, drafter=drafter)
        if not drafter:
            self._held.pop().unlink()

    def finish(self) -> None:
        """See `Transport`."""
        for path in self._held:
            path.unlink(missing_ok=True)
        self._held.clear()

    def close(self) -> None:
        """See `Transport`."""
        self._directory.close()


class CudaIpcTransport:
    """Handles of GPU memory: tensors are packed into one buffer of this call, which the engine maps and copies from.

    Packing also separates them from the stream's own memory, which is used again for the next bucket.
    """

    def __init__(self, process: EngineProcess):
        self._process = process
        self._held: list[Tensor] = []

    def send(self, version: int, tensors: Sequence[Named], drafter: bool = False) -> None:
        """See `Transport`. Raises SyncError for a tensor that is not on the GPU."""
        packed = list(pack_tensors(tensors))
        self._held += [tensor for _, tensor in packed]
        torch.cuda.synchronize()  # the copies must be there before another process reads them
        entries = [ipc_entry(name, tensor, self._process.launch.section) for name, tensor in packed]
        self._process.call("weights", version=version, entries=entries, drafter=drafter)
        if not drafter:
            del self._held[-len(packed) :]

    def finish(self) -> None:
        """See `Transport`."""
        self._held.clear()
        torch.cuda.ipc_collect()

    def close(self) -> None:
        """See `Transport`."""
        self._held.clear()


def pack_tensors(tensors: Sequence[Named]) -> Iterator[Named]:
    """Copies of the tensors, contiguous, side by side in one buffer of their device. Raises SyncError."""
    devices = {tensor.device for _, tensor in tensors}
    if len(devices) > 1:
        raise SyncError(f"tensors of one bucket lie on {', '.join(sorted(map(str, devices)))}")
    sizes = [tensor.numel() * tensor.element_size() for _, tensor in tensors]
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    buffer = torch.empty(max(1, places[-1]), dtype=torch.uint8, device=next(iter(devices), None))
    for (name, tensor), size, place in zip(tensors, sizes, places, strict=False):
        copy = buffer[place : place + size].view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor)
        yield name, copy


def ipc_entry(name: str, tensor: Tensor, section: str) -> dict[str, Any]:
    """An entry with the tensor's CUDA handle: what torch's own reduction gives, as plain data.

    Raises SyncError, which may name a setting of the engine's `section`.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    if not tensor.is_cuda:
        raise SyncError(f"{name} lies on {tensor.device}: cuda_ipc needs CUDA tensors")
    _, args = reduce_tensor(tensor)
    ipc = plain_ipc(args)
    return {**describe(name, tensor), "ipc": {**ipc, "handle": older_handle(ipc["handle"], section)}}


def older_handle(handle: bytes, section: str) -> bytes:
    """A memory handle in the form that the engine's torch reads, which is older than this one. Raises SyncError.

    Only handles of plain memory have one: those of expandable segments changed with the version.
    """
    if len(handle) <= _DRIVER_BYTES:
        return handle
    version, kind = handle[:2]
    if version <= _VERSION:
        return handle
    if kind != _PLAIN:
        what = "an expandable segment" if kind == _EXPANDABLE else f"memory of kind {kind}"
        raise SyncError(
            f"a handle of {what} in version {version}, which the engine's torch does not read: remove "
            f"expandable_segments from PYTORCH_CUDA_ALLOC_CONF, or set {section}.transport to shared_memory"
        )
    return bytes([_VERSION]) + handle[1:]


def plain_ipc(args: Sequence[Any]) -> dict[str, Any]:
    """The arguments of torch's `rebuild_cuda_tensor` without its classes: numbers and bytes.

    In torch's order: tensor class, size, stride, offset, storage class, dtype, device, and `IPC_NAMES`. The device
    is left out; the engine opens the handle on its own, which is the same GPU.
    """
    values = dict(zip(IPC_NAMES, args[DEVICE + 1 :], strict=True))
    return {"stride": [int(n) for n in args[2]], "offset": int(args[3]), **values}
