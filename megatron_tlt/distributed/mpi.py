"""MPI's start and end in a rank. Torch-free: a rank that refuses to start has not imported torch yet."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

from megatron_tlt.distributed.heap import on_clean_heap

if TYPE_CHECKING:
    from mpi4py import MPI

START_S = 600.0  # at least, from a rank's MPI_Init until all have met: hosts may import at very different speeds
_LEAVE_S = 0.3  # mpiexec takes a rank that exits right after MPI_Finalize for crashed: its last message is on the way


def has_started() -> bool:
    """Whether this process has initialised MPI. From then on an exit with an error ends all ranks (`-m mpi4py`)."""
    return "mpi4py.MPI" in sys.modules


@contextmanager
def bounded_start(limit_s: float) -> Iterator[None]:
    """Exits with code 1 and this process's stacks on stderr where the block takes longer than `limit_s`: one host that
    does not come would hold all others in MPI_Init to the job's end. `ranks_have_met` ends the limit earlier.

    By a thread in C: MPI_Init holds the GIL while it waits, so no line of Python's can come then.
    """
    faulthandler.dump_traceback_later(limit_s, exit=True, file=2)
    try:
        yield
    finally:
        ranks_have_met()


def ranks_have_met() -> None:
    """Ends the limit of `bounded_start`. Idempotent."""
    faulthandler.cancel_dump_traceback_later()


def start_mpi(code: int = 0, report: Callable[[], None] = lambda: None) -> MPI.Comm:
    """Initialises MPI; the communicator of all ranks. Collective.

    A rank that has failed before takes part, too, with the exit code that it ends with: without it the others wait in
    MPI_Init for ever. Every rank then ends here, with the code of the first such rank, after that rank's `report`.
    """
    import mpi4py  # here, because it initialises MPI at import

    mpi4py.rc.thread_level = "multiple"
    if "SLURM_STEP_ID" in os.environ and "PMI_FD" in os.environ:  # srun's pmi2 plugin is the PMI
        on_clean_heap(_wait_for_all_ranks_in_mpi_init)
    _wait_for_all_ranks_in_mpi_init()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    codes = comm.allgather(code)
    if any(codes):
        first = next(rank for rank, code in enumerate(codes) if code)
        if comm.rank == first:
            report()
        exit_together(codes[first])
    return comm


def _wait_for_all_ranks_in_mpi_init() -> None:
    """Imports mpi4py.MPI, once. Its name says in the stacks of `bounded_start` what was waited for."""
    importlib.import_module("mpi4py.MPI")


def exit_together(code: int) -> NoReturn:
    """Ends MPI and this process, without the seconds of tearing an interpreter down. Collective."""
    from mpi4py import MPI

    MPI.Finalize()
    with suppress(OSError):  # the code counts, also on a full disk
        sys.stdout.flush()
    time.sleep(_LEAVE_S)
    os._exit(code)
