"""A worker process of a rank: how it is started, and how it is set up before a user's code runs in it.

This module imports no numpy: a worker limits numpy's threads first (`set_up`).
"""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import context, resource_tracker
from pathlib import Path
from types import ModuleType

from megatron_tlt.workers.child_signals import signals_blocked, unblock_signals
from megatron_tlt.workers.descendants import die_with, end_descendants

# Variables by which a launcher's MPI finds its ranks: removed, so that a user's function may import mpi4py, and an
# engine starts MPI or Ray of its own.
LAUNCHER = ("PMI_", "PMIX_", "PMI2_", "MPI_", "MPIR_", "MPICH_", "OMPI_", "HYDRA_", "HYDI_", "SLURM_")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # of a library
_OUT_OF_MEMORY = errno.ENOMEM  # exit code of `end_if_full`
_NO_MEMORY = re.compile("MemoryError|out of memory|cannot allocate memory", re.IGNORECASE)  # Python, torch, Linux
_loaded = 0  # bytes at `note_loaded`
_main_module = threading.Lock()


class WorkerProcess(context.SpawnProcess):
    """A fresh interpreter without the rank's main module, which multiprocessing would import and which starts MPI."""

    def start(self) -> None:
        """Starts the process; signals to the rank are blocked until `set_up` handles them."""
        resource_tracker.ensure_running()  # not below: its start unblocks SIGTERM and SIGINT
        with _main_module:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")
            try:
                with signals_blocked():
                    super().start()
            finally:
                sys.modules["__main__"] = main

    def kill_group(self) -> None:
        """Kills the process and those below it, also in sessions of their own. Does nothing to one that has ended."""
        if self.pid is not None:
            if self.is_alive():
                end_descendants(self.pid)
            with suppress(ProcessLookupError):  # a worker that is still importing has no group yet
                os.killpg(self.pid, signal.SIGKILL)
            self.kill()


def set_up(rank: int, cpus: Collection[int] = ()) -> None:
    """Makes this process a worker of the rank with process id `rank`: it dies with the rank, is a process group of its
    own, has one thread a library, no trace of MPI, and prints to stderr. Its multiprocessing forks.

    `cpus`: those that it may run on; none: those of the rank.
    """
    die_with(rank)
    if cpus:
        os.sched_setaffinity(0, cpus)
    os.setsid()
    os.dup2(2, 1)  # prints of a user's function must not mix with the rank's own output
    for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
        del os.environ[name]
    os.environ.update(ONE_THREAD)
    unblock_signals()
    # A spawned process spawns its own, which could not import the module of a user's file (`user_code`); a fork has it.
    multiprocessing.set_start_method("fork", force=True)  # this process has one thread


def limit_memory(mib: int) -> None:
    """Limits the process: more raises MemoryError in the user's function, before the machine is out of memory.

    If the machine runs out of memory all the same, Linux kills this process and not a rank.
    """
    wanted = mib << 20
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or wanted <= most:
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, wanted))
    with suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


@contextmanager
def forks_ended() -> Iterator[None]:
    """Around a call of a user's code: a fork that it made and did not end ends here, for only the worker may answer.

    The fork's exit code is that of a program that ends by the same `sys.exit` or error.
    """
    worker, code = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        given = error.code if isinstance(error, SystemExit) else 1
        code = given & 0xFF if isinstance(given, int) else int(given is not None)
        raise
    finally:
        if os.getpid() != worker:
            os._exit(code)


def note_loaded() -> None:
    """What this process has taken now, with the user's code loaded, is no reason for `end_if_full`."""
    global _loaded  # noqa: PLW0603  of the process
    _loaded = _data_bytes()


def end_if_full(failure: str) -> None:
    """Ends this process and those below it if `failure` is of memory and half of what was left after `note_loaded` is
    still taken.

    Another process takes its place: in this one every later call could fail, too. Call it when the error itself, which
    holds the variables of its functions, is gone.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if not _NO_MEMORY.search(failure) or limit == resource.RLIM_INFINITY:
        return
    gc.collect()
    if 2 * _data_bytes() > _loaded + limit:
        end_descendants(os.getpid())
        os._exit(_OUT_OF_MEMORY)


def _data_bytes() -> int:
    """What counts against RLIMIT_DATA."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("VmData:")[2].split()[0])


def ended(exitcode: int | None) -> str:
    """How a worker ended, for messages."""
    code = exitcode or 0
    if code == _OUT_OF_MEMORY:
        return "worker had no memory left (worker_memory_mib) and was replaced"
    return f"worker was ended by signal {-code}" if code < 0 else f"worker ended with exit code {code}"
