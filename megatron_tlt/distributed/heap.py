"""glibc's heap: freed pages are kept, and a clean heap for MPI's start under srun.

A page that is new to the process costs the kernel a fault and 4 KiB of zeros, as much time as some 50,000
multiplications. By default glibc returns large freed blocks at once, so activations would be on new pages.

MPICH 5 (ch4:ucx) sends other nodes its address through the launcher's PMI, and with it what lies behind the address in
memory, 4 KiB in all: hexadecimal in lines of some 500 bytes each, with runs of zeros packed. Slurm 22.05's pmi2 plugin
takes lines of up to 1,023 characters and the rest for another request. So a rank with a heap full of data dies in
MPI_Init ("value not properly terminated in client request"): about every third start on two nodes
(docs/design/decisions.md).

A thread that is new to glibc's malloc mostly gets memory of its own, without the main one's live data between; its
free part is made zero first, for it may have been another thread's.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

_SIZES = (65536, 16384, 4096, 1536)  # of the blocks that are taken, zeroed and given back: 64 of each
_COUNT = 64


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # parameters of mallopt(3)


def keep_freed_pages() -> None:
    """Makes glibc reuse freed memory of any size and return none to the kernel. Elsewhere does nothing.

    The process keeps the memory of its largest moment.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)  # no block in a mapping of its own, which would end with it
        mallopt(_M_TRIM_THRESHOLD, -1)


def on_clean_heap(start: Callable[[], object]) -> None:
    """Calls `start` in a thread of its own, on memory that is mostly zero. Raises what it raises."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            _wash()
            start()
        except BaseException as error:  # noqa: BLE001  raised again by the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, name="mpi-start")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _wash() -> None:
    """Makes this thread's free memory zero, most of it."""
    libc = ctypes.CDLL(None)
    libc.calloc.restype, libc.calloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    for block in [libc.calloc(1, size) for size in _SIZES for _ in range(_COUNT)]:
        libc.free(block)
