"""How tensors reach the engine's process, as configured: files in shared memory or handles of GPU memory.

Both yield where the tensors lie as plain data (see `entries.py`), for one message; its reply says that they were read.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_tlt.errors import ConfigError, SyncError
from megatron_tlt.workers.scratch import ScratchDirectory

if TYPE_CHECKING:
    from torch import Tensor

Named = tuple[str, "Tensor"]
_SHARED = Path("/dev/shm")
_GPU = "cuda"
# A CUDA memory handle as torch's allocator writes it: a byte with the format's version, a byte with the kind of memory,
# and the driver's own bytes.
_PLAIN, _EXPANDABLE = ord("c"), ord("e")  # memory of cudaMalloc; of an expandable segment
_VERSION = 2  # the newest that torch <= 2.12 reads, as TensorRT-LLM's; 2.13 writes 3, the same bytes for plain memory


class SharedDirectory(ScratchDirectory):
    """A directory in shared memory."""

    def __init__(self, section: str) -> None:
        """Raises ConfigError, which names the engine's `section`, where the machine has no shared memory."""
        if not _SHARED.is_dir():
            raise ConfigError.of(section, "an engine in another process", f"needs {_SHARED}")
        super().__init__("tlt-", _SHARED)


def write_shared(path: Path, tensors: Iterable[Named]) -> None:
    """Writes tensors into a safetensors file in shared memory. Raises SyncError where it has no room for them."""
    named = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors}
    try:
        save_file(named, path)
    except (SafetensorError, OSError) as error:
        path.unlink(missing_ok=True)
        needed, free = sum(tensor.nbytes for tensor in named.values()), shutil.disk_usage(path.parent).free
        sizes = f"{needed / 2**20:.1f} MiB are needed, {free / 2**20:.1f} MiB are free in shared memory"
        remedy = "--shm-size sets its size for a container, sync.bucket_mib that of a part of a weight sync"
        raise SyncError(f"cannot write {path}: {sizes} ({remedy}): {error}") from error


@contextmanager
def in_shared_memory(tensors: Sequence[Named], directory: Path) -> Iterator[dict[str, Any]]:
    """Full tensors in a file of `directory`, which is removed afterwards. Raises SyncError."""
    path = directory / "tensors"
    try:
        write_shared(path, tensors)
        yield {"file": str(path)}
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def by_cuda_ipc(tensors: Sequence[Named]) -> Iterator[dict[str, Any]]:
    """Handles of copies of full tensors, for the stream's own memory is used again for the next bucket.

    Raises SyncError.
    """
    form = torch.contiguous_format
    copies = {name: t.detach().to(_GPU, copy=True, memory_format=form) for name, t in tensors}
    torch.cuda.synchronize()  # the copies must be there before another process reads them
    yield {"ipc": {name: ipc_arguments(copy) for name, copy in copies.items()}}
    copies.clear()
    torch.cuda.ipc_collect()


def ipc_arguments(tensor: Tensor) -> list[Any]:
    """The result of torch's own reduction of a CUDA tensor, as plain data: the arguments of `rebuild_cuda_tensor`.

    Without its classes and the device: the engine opens the handle on its own, which is the same GPU. Raises SyncError.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    _, (_, size, stride, offset, _, dtype, _, handle, *rest) = reduce_tensor(tensor)
    name = str(dtype).removeprefix("torch.")
    return [list(size), list(stride), offset, name, older_handle(handle), *rest]


def older_handle(handle: bytes) -> bytes:
    """A memory handle in a form that the torch of every engine reads, which may be older than this one. Raises
    SyncError.

    Only handles of plain memory have one: those of expandable segments changed with the version.
    """
    version, kind = handle[:2]
    if kind != _PLAIN:
        what = "an expandable segment" if kind == _EXPANDABLE else f"memory of kind {kind}"
        raise SyncError(
            f"a handle of {what} in version {version}, but weights are sent by handles of plain memory only: remove "
            f"expandable_segments from PYTORCH_CUDA_ALLOC_CONF, or set sync.transport to shared_memory"
        )
    return bytes([_VERSION]) + handle[1:]
