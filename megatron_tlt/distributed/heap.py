"""A heap of its own for MPI's start.

MPICH 5 (ch4:ucx) tells other nodes its address through the launcher's PMI, and with it what lies behind the address in
memory, 4 KiB in all: hexadecimal in lines of some 500 bytes each, with runs of zeros packed. Slurm 22.05's pmi2 plugin
takes lines of up to 1,023 characters and the rest for another request. So a rank with a heap full of data dies in
MPI_Init ("value not properly terminated in client request"): about every third start on two nodes (docs/log.md).

A thread that is new to glibc's malloc gets memory that nobody has written to yet.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

_M_PERTURB = -6  # glibc's <malloc.h>: malloc fills what it gives with the complement of this byte


def on_fresh_heap(start: Callable[[], object]) -> None:
    """Calls `start` in a thread of its own, where malloc gives zeros. Raises what it raises."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            start()
        except BaseException as error:  # noqa: BLE001  raised again by the caller's thread
            failed.append(error)

    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)  # other C libraries have none
    thread = threading.Thread(target=run, name="mpi-start")
    mallopt(_M_PERTURB, 0xFF)
    try:
        thread.start()
        thread.join()
    finally:
        mallopt(_M_PERTURB, 0)
    if failed:
        raise failed[0]
