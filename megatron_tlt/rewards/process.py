"""The rank's end of one reward worker: starts and kills the process, sends samples."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from megatron_tlt.config.data import RewardSection
from megatron_tlt.distributed.child_signals import signals_blocked
from megatron_tlt.errors import RewardError
from megatron_tlt.types import Prompt, RewardResult, Sample

Job = tuple[int, Prompt, Sample]  # place in the caller's list, and what to judge

# Not multiprocessing's spawn: that imports the parent's main module again, which here starts MPI.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from megatron_tlt.rewards.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
# Variables by which MPI finds its ranks: removed, so that a user's function may import mpi4py.
_LAUNCHER = ("PMI_", "PMIX_", "PMI2_", "MPI_", "MPIR_", "MPICH_", "OMPI_", "HYDRA_", "HYDI_", "SLURM_")
_START_TIMEOUT_S = 120.0


class WorkerProcess:
    """One worker. It judges `job` since `since`, or is idle (None)."""

    def __init__(self, section: RewardSection):
        """Starts the process; returns at once, see `wait_ready`."""
        ours, theirs = socket.socketpair()
        with theirs, signals_blocked():  # the rank decides when to stop
            path = json.dumps([p or str(Path.cwd()) for p in sys.path])
            command = [sys.executable, "-c", _BOOT, path, str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a user's function prints must not mix with the rank's own output
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # so that killing it also kills what a user's function started
            )
        self.connection = Connection(ours.detach())
        self.connection.send(section)
        self.job: Job | None = None
        self.since = 0.0
        self._ready = False

    def wait_ready(self) -> None:
        """Waits until the reward functions are loaded. Raises RewardError."""
        if self._ready:
            return
        answer: object = ("error", f"no answer within {_START_TIMEOUT_S:g} s")
        try:
            if self.connection.poll(_START_TIMEOUT_S):
                answer = self.connection.recv()
        except (EOFError, ConnectionError):
            answer = ("error", self.exit_text())
        if isinstance(answer, tuple):
            self.kill()
            raise RewardError(f"a reward worker did not start: {answer[1]}")
        self._ready = True

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def send(self, job: Job) -> None:
        """Sends a sample. A dead worker has a closed connection, which `verdict` finds."""
        self.job, self.since = job, time.monotonic()
        with suppress(ConnectionError):
            self.connection.send(job[1:])

    def verdict(self, timeout_s: float) -> RewardResult | None:
        """The verdict on the sample sent; None: not yet. Raises RewardError if it takes longer, or will not come."""
        try:
            if self.connection.poll(0):
                found: RewardResult = self.connection.recv()
                self.job = None
                return found
        except (EOFError, ConnectionError) as error:
            raise RewardError(f"worker {self.exit_text()}") from error
        if time.monotonic() - self.since >= timeout_s:
            raise RewardError(f"no verdict within {timeout_s:g} s")
        return None

    def exit_text(self) -> str:
        """How the process ended, once it has closed its connection."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """Ends the process and everything it started. Idempotent."""
        with suppress(ProcessLookupError):  # the whole group is gone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
    return kept | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
