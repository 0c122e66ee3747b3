"""A clean heap for MPI's start under srun.

MPICH 5 (ch4:ucx) tells other nodes its address through the launcher's PMI, and with it what lies behind the address in
memory, 4 KiB in all: hexadecimal in lines of some 500 bytes each, with runs of zeros packed. Slurm 22.05's pmi2 plugin
takes lines of up to 1,023 characters and the rest for another request. So a rank with a heap full of data dies in
MPI_Init ("value not properly terminated in client request"): about every third start on two nodes (docs/log.md).

A thread that is new to glibc's malloc mostly gets memory of its own, without the main one's live data between; what is
free there is made zero first, for it may have been another thread's.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

_SIZES = (65536, 16384, 4096, 1536)  # of the blocks that are taken, zeroed and given back: 64 of each
_COUNT = 64


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
