"""The world: MPI launches, torch.distributed carries tensors.

Rank 0 opens a TCPStore on a free port and broadcasts it over MPI: no MASTER_ADDR, no port races. The store
doubles as the *phase board*: each rank writes its phase there, so that the message of a collective that times out
names the missing ranks and their phases.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from megatron_tlt.distributed.devices import (
    check_gpus,
    choose_device,
    gpu_uuid,
    hide_gpus,
    set_nccl_environment,
)
from megatron_tlt.distributed.heap import keep_freed_pages
from megatron_tlt.distributed.launch import detect_launch, foreign_launch
from megatron_tlt.distributed.mpi import START_S, bounded_start, exit_together, ranks_have_met, start_mpi
from megatron_tlt.errors import DistributedError

if TYPE_CHECKING:
    from mpi4py import MPI

    from megatron_tlt.config.run import DistributedSection
    from megatron_tlt.interfaces import RankMonitor, RankOutcome

_log = logging.getLogger(__name__)

_POLL_S = 0.1  # at most between two looks at a counter
_REFUSE_S = 5.0  # for the other ranks to find the same problems
_STORE_S = 10.0  # for rank 0 to answer
_SRUN_REMEDY = "try --mpi=pmi2 for the mpich wheel, --mpi=pmix for a site's MPI"
_INTERFACE_REMEDY = "set GLOO_SOCKET_IFNAME (slurm/: IFACE) to the interface between the hosts (ip -br address)"
_MPIEXEC_REMEDY = "use the mpiexec of the MPI that mpi4py has, beside python for the mpich wheel; `doctor` names it"
_OPEN_FILES = 65536
_FEWEST_FILES, _FILES_PER_RANK = 256, 4  # two ranks with a drafter have some 150; a group of N connects to N
_SIOCGIFADDR = 0x8915  # Linux's request for an interface's IPv4 address
_ABORT_S = 20.0  # for the launcher to end a rank after another one's MPI_Abort


def allow_open_files(size: int) -> None:
    """Raises this process's limit of open files as far as it may. Raises DistributedError where that is too low for a
    rank of `size`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    needed = _FEWEST_FILES + _FILES_PER_RANK * size
    if most < needed:
        allowed = f"a rank of {size} needs {needed} for connections and files (ulimit -n, LimitNOFILE, --ulimit nofile)"
        raise DistributedError(f"this process may have {most} open files: {allowed}")


@dataclass
class _Phase:
    """This rank's phase, the number of counters it has made, its monitor, and the functions to call at its end.

    Mutable on purpose: the world is frozen.
    """

    name: str = "start"
    step: int = -1
    order: int = 0
    counters: int = 0
    monitor: RankMonitor | None = None
    outcome: tuple[RankOutcome, str] = ("done", "")
    releases: list[Callable[[], None]] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)
    is_accepted: bool = False


@dataclass(frozen=True)
class World:
    """Frozen context of one rank, passed as an argument; there are no global getters."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    timeout_s: float
    store: dist.Store
    comm: MPI.Comm = field(repr=False)
    _phase: _Phase = field(default_factory=_Phase, repr=False)

    @classmethod
    def start(cls, section: DistributedSection, threads: int | None = None) -> World:
        """Initialises MPI and torch.distributed once. Collective. With `device` cpu hides GPUs from this process.

        Raises DistributedError if another launcher than MPI's started it, if the ranks cannot connect, if two have the
        same GPU, or if the world does not have the size that the launcher announced: a wrong pair of launcher and MPI
        library silently gives N worlds of one rank. Exits where the ranks do not meet (`bounded_start`).
        """
        if problem := foreign_launch():
            raise DistributedError(problem)
        if section.device == "cpu":
            hide_gpus()
        with bounded_start(max(START_S, section.timeout_s)):
            return cls._start(section, threads)

    @classmethod
    def _start(cls, section: DistributedSection, threads: int | None) -> World:
        comm = start_mpi()
        allow_open_files(comm.size)  # now: a rank that fails before MPI's start leaves the others waiting there
        launch = detect_launch()
        if launch.size is not None and comm.size != launch.size:
            raise DistributedError(
                f"{launch.launcher} started {launch.size} ranks, but MPI has {comm.size}: launcher and MPI library do "
                f"not match ({_SRUN_REMEDY if launch.launcher == 'srun' else _MPIEXEC_REMEDY})"
            )
        hosts: list[str] = comm.allgather(socket.gethostname())
        _unlink_shared_memory()
        local = [r for r, host in enumerate(hosts) if host == hosts[comm.rank]]
        local_rank = launch.local_rank if launch.local_rank is not None else local.index(comm.rank)
        if threads is not None:
            torch.set_num_threads(threads)
        device = choose_device(section.device, local_rank)
        check_gpus(hosts, comm.allgather(gpu_uuid(device)))
        if device.type == "cpu":
            keep_freed_pages()
        try:
            store = _join(comm, hosts, device, section.timeout_s)
        except OSError as error:  # of rank 0, for its address
            names = f"rank 0 finds no address of {hosts[0]} at which the other hosts reach it ({error})"
            raise DistributedError(f"{names}: {_INTERFACE_REMEDY}, or make the host names resolve") from error
        except RuntimeError as error:  # PyTorch's, of stores and groups
            limit = f"within {section.timeout_s:g} s (distributed.timeout_s)"
            where = f"rank {comm.rank} of {comm.size} on {hosts[comm.rank]}"
            remedy = f"; {_INTERFACE_REMEDY}" if len(set(hosts)) > 1 else ""
            raise DistributedError(f"{where} could not connect to all others {limit}: {error}{remedy}") from error
        return cls(comm.rank, comm.size, local_rank, len(local), device, section.timeout_s, store, comm)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def where(self) -> str:
        """The phase and the step this rank is in, for messages."""
        return _where(self._phase.name, self._phase.step)

    def enter(self, phase: str, step: int | None = None) -> None:
        """Writes to the phase board what this rank does now, in step number `step` (from 1; None: as before).
        Microseconds; never waits for another rank.
        """
        self._phase.name, self._phase.order = phase, self._phase.order + 1
        if step is not None:
            self._phase.step = step
        self.store.set(f"phase/{self.rank}", f"{self._phase.order}|{self._phase.step}|{phase}")
        if self._phase.monitor is not None:
            self._phase.monitor.enter(phase, self._phase.step)

    def set_monitor(self, start: Callable[[], RankMonitor]) -> None:
        """Closes the present monitor, if there is one; from now on what `start` returns gets this rank's phases."""
        self._close_monitor()
        self._phase.outcome = ("done", "")
        self._phase.monitor = monitor = start()
        monitor.enter(self._phase.name, self._phase.step)

    def heartbeat(self, **figures: Any) -> None:
        """A sign of life within a phase; `figures` as in `RankMonitor.report`. Microseconds."""
        if self._phase.monitor is not None:
            self._phase.monitor.report(**figures)

    def new_counter(self) -> Callable[[int], int]:
        """A counter that all ranks share, 0 at first: called with a number, it adds that and returns its new value.

        All ranks make their counters in the same order. A call takes microseconds to a millisecond and waits for no
        rank: a thread of rank 0 serves the store, whatever rank 0 does.
        """
        self._phase.counters += 1
        return partial(self.store.add, f"counter/{self._phase.counters}")

    def wait_for_all(self) -> None:
        """Waits for every rank, for any length of time and with signs of life; a tenth of the wait at most is lost.

        Before a collective that some ranks reach much later: its own time is bounded (`timeout_s`). After each such
        time a line names those that are missing. What ends a job that hangs is the watchdog, where there is one.
        """
        count, began, times = self.new_counter(), time.monotonic(), 0
        number = self._phase.counters
        self.store.set(f"waits/{self.rank}", str(number))
        arrived = count(1)
        while arrived < self.size:
            self.heartbeat(state="IDLE")
            waited = time.monotonic() - began
            if waited > (times + 1) * self.timeout_s:
                times += 1
                self._name_missing(number, waited)
            time.sleep(min(_POLL_S, 0.1 * waited + 1e-3))
            arrived = count(0)

    def _name_missing(self, number: int, waited: float) -> None:
        """Names the ranks that have not come to the wait of this number, in a line of the first rank that has."""
        come = {rank: int(text) >= number for rank, text in enumerate(self._read_board("waits"))}
        missing = [rank for rank in come if not come[rank]]
        if not missing:  # the last one has come since
            return
        named = ", ".join(map(str, missing[:8])) + (" .." if len(missing) > 8 else "")
        if self.rank == min(rank for rank in come if come[rank]):
            _log.warning("waited %.0f s for rank %s in %s", waited, named, self.where)

    def barrier(self) -> None:
        """Waits for every rank (gloo or NCCL; sleeps, does not spin)."""
        dist.barrier()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums over all ranks, in place, with the same bits on every rank. Collective."""
        dist.all_reduce(tensor)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Small Python values of every rank, by rank. Collective."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """A small Python value of rank `source`. Collective."""
        box = [value]
        dist.broadcast_object_list(box, src=source)
        return box[0]

    def ranks_behind(self) -> dict[int, str]:
        """Ranks that have not reached this rank's phase, each with the phase it is in: for a timeout's message.

        Rank 0 alone, if its process does not serve the store any more.
        """
        behind = {}

        def read_phases() -> None:
            for rank, text in enumerate(self._read_board("phase")):
                order, step, phase = text.split("|", 2)
                if int(order) < self._phase.order:
                    behind[rank] = _where(phase, int(step))

        return behind if _is_answered(read_phases) else {0: "an unknown phase, its store does not answer"}

    def _read_board(self, name: str) -> list[str]:
        """Entry `name` of every rank, in one request: after a timeout many ranks read the board at once."""
        return [text.decode() for text in self.store.multi_get([f"{name}/{rank}" for rank in range(self.size)])]

    def abort(self, code: int = 1, detail: str = "", waited_for: Sequence[int] = ()) -> None:
        """Ends every rank of the job with a non-zero exit.

        After a timeout this rank `waited_for` others, and all stacks are written first.
        """
        with suppress(OSError):  # a full disk must not keep this rank from ending the others
            sys.stdout.flush()
        if self._phase.monitor is not None:
            self._phase.monitor.close("timeout" if waited_for else "failed", detail, waited_for)
        aborts = [1]
        _is_answered(lambda: aborts.append(self.store.add("abort", 1)))
        if aborts[-1] > 1:  # of two aborts at once mpiexec reports SIGKILL's 9
            time.sleep(_ABORT_S)
        self.comm.Abort(code)

    def leave(self, code: int) -> NoReturn:
        """Orderly end of all ranks with a non-zero exit status. Collective; does not return.

        When one rank exits with an error, launchers kill the others and report that. So they exit together, when
        MPI is closed, without the seconds of tearing an interpreter down.
        """
        self.close()
        exit_together(code)

    def ends_early(self, saved: bool, detail: str) -> None:
        """Sets how this rank ends: before the run's last step, with or without a checkpoint; `detail` for people."""
        self._phase.outcome = ("saved" if saved else "ended", detail)

    def at_close(self, release: Callable[[], None]) -> None:
        """Has `release` called before the process groups are destroyed. It may have been called already. Mutates."""
        self._phase.releases.append(release)

    def release(self) -> None:
        """Calls what `at_close` was given, the last first, each once: for an end without `close`. Mutates."""
        while self._phase.releases:
            self._phase.releases.pop()()

    def at_refusal(self, undo: Callable[[], None]) -> None:
        """Has `undo` called if the start is refused (`refuse`), until `accept`. Mutates."""
        self._phase.undo.append(undo)

    def accept(self) -> None:
        """The start is not refused any more: what it has made stays. Mutates."""
        self._phase.undo.clear()
        self._phase.is_accepted = True

    @property
    def is_accepted(self) -> bool:
        """Whether the start is not refused any more: the job has written something."""
        return self._phase.is_accepted

    def refuse(self, outcome: RankOutcome, detail: str) -> None:
        """This rank's end after an error that all ranks find, such as wrong input, without `close`: releases its parts,
        and undoes what the start has made.

        Not collective: one rank may be alone. Mutates.
        """
        self.release()
        self._phase.outcome = (outcome, detail)
        self._close_monitor()
        while self._phase.undo:
            self._phase.undo.pop()()

    def leave_refused(self, code: int) -> None:
        """Ends this process as `leave` does if every rank has refused (`refuse`); returns where one has not in time.

        Where a process exits with an error before MPI's end, `-m mpi4py` aborts, with a line of MPI's own a rank.
        """
        if detect_launch().launcher == "none":
            return
        until = time.monotonic() + _REFUSE_S
        self.store.add("refused", 1)
        while self.store.add("refused", 0) < self.size:
            if time.monotonic() > until:
                return
            time.sleep(0.02)
        exit_together(code)

    def close(self) -> None:
        """Orderly end: waits for all ranks, so that rank 0's store outlives its clients."""
        self.release()
        dist.barrier()
        dist.destroy_process_group()
        self._close_monitor()

    def _close_monitor(self) -> None:
        if self._phase.monitor is not None:
            self._phase.monitor.close(*self._phase.outcome)


def _where(phase: str, step: int) -> str:
    return f"phase {phase}, step {step}" if step >= 0 else f"phase {phase}"


def _is_answered(ask_store: Callable[[], object]) -> bool:
    """Whether the store answers. Its client waits without limit for a rank 0 that is stopped or whose host is gone."""
    answers: Queue[bool] = Queue()

    def ask() -> None:
        try:
            ask_store()
        except RuntimeError:  # rank 0 has ended, and its store
            answers.put(False)
        else:
            answers.put(True)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=_STORE_S)
    except Empty:
        return False


def _unlink_shared_memory() -> None:
    """Removes the names of the files in which MPICH shares memory among a host's ranks: they stay mapped.

    MPICH removes them at its orderly end only. One of 1 MiB and more would stay for each job that is killed. Every
    rank has mapped them when one of them gets here.
    """
    with suppress(OSError):  # no /proc
        for path in set(re.findall(r"/dev/shm/mpich_shm_\w+", Path("/proc/self/maps").read_text("utf-8"))):
            Path(path).unlink(missing_ok=True)


def _join(comm: MPI.Comm, hosts: list[str], device: torch.device, timeout_s: float) -> dist.Store:
    timeout = timedelta(seconds=timeout_s)
    one_host = len(set(hosts)) == 1
    if one_host:
        # Gloo otherwise binds whatever the host name resolves to, which on a laptop may be nothing.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    if device.type == "cuda":
        set_nccl_environment()
    address: tuple[str, int] | None = None
    if comm.rank == 0:
        host = "127.0.0.1" if one_host else _reachable_address(hosts)
        server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        address = (host, server.port)
    host, port = comm.bcast(address, root=0)
    ranks_have_met()  # PyTorch bounds its waits itself, with better words
    store = server if comm.rank == 0 else dist.TCPStore(host, port, is_master=False, timeout=timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    board = dist.PrefixStore("board", store)
    board.set(f"phase/{comm.rank}", "0|-1|start")  # before the group connects: reads find all
    board.set(f"waits/{comm.rank}", "0")
    group_store = dist.PrefixStore("world", store)
    dist.init_process_group(backend, store=group_store, rank=comm.rank, world_size=comm.size, timeout=timeout)
    return board


def _reachable_address(hosts: list[str]) -> str:
    """The address at which the other hosts reach this one, the first of `hosts`: of the interface that
    GLOO_SOCKET_IFNAME names, else of the host name. Raises OSError.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with suppress(OSError):  # none of this name, or without an IPv4 address: gloo says so
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface))
            address = socket.inet_ntoa(found[20:24])
            if not address.startswith("127."):
                return address
        address = socket.gethostbyname(hosts[0])
        if not address.startswith("127."):
            return address
        # Debian gives a machine's own name to 127.0.1.1: take the address from which packets to another host leave.
        other = next(host for host in hosts if host != hosts[0])
        probe.connect((other, 9))  # sends nothing
        return str(probe.getsockname()[0])
