"""The rank's side of one worker: a process (`serve`), a pipe, and a thread that waits for its answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from megatron_tlt.errors import TltError
from megatron_tlt.workers.process import WorkerProcess, ended
from megatron_tlt.workers.serve import Host, serve

_START_TIMEOUT_S = 300.0  # a module of the user's may import torch from a cold disk
_BEAT_S = 1.0  # of waiting for answers, between two signs of life
T = TypeVar("T")


class WorkerError(TltError):
    """A worker has no answer: the user's code in it failed, or, by the class, something else happened."""


class WorkerStartError(WorkerError):
    """It cannot be started, or cannot load the user's code, or has been closed."""


class WorkerLateError(WorkerError):
    """It did not answer in time, and was killed."""


class WorkerLostError(WorkerError):
    """The process has died: of the request, or before it."""


def twice(ask: Callable[[], T], of: type[WorkerError] = WorkerLostError) -> T:
    """What a worker answers. After an error `of` that class it is asked once more, one that is lost in another process:
    perhaps the request was not the reason. In the worker's thread.
    """
    try:
        return ask()
    except of:
        return ask()


def wait_for(futures: Sequence[Future[Any]], on_wait: Callable[[], None]) -> None:
    """Until all are done. `on_wait` is called every second or so: a slow function is no hang."""
    on_wait()
    while wait(futures, _BEAT_S).not_done:
        on_wait()


class Worker:
    """One worker, started with its first request and started anew after a request that it did not survive."""

    def __init__(
        self,
        make_host: Callable[[], Host],
        code: Mapping[str, str],
        memory_mib: int,
        timeout_s: float,
        cpus: Collection[int] = (),
    ):
        """`make_host` is called in the process, whose memory is limited to `memory_mib`: a function of a module that
        imports no numpy. `code`: what this process has loaded of the user's (`loaded_code`), without which a process
        does not begin. `timeout_s`: of one call of it; `cpus`: see `set_up`. Sets PYTHONHASHSEED in this process's
        environment where it is not: hashes of texts, and with them the order of a set, are the same in each worker, and
        after a restart.
        """
        # For good, and before the thread: while that starts a process, another one may be reading the environment.
        if not os.environ.get("PYTHONHASHSEED"):
            os.environ["PYTHONHASHSEED"] = "0"
        self._given, self._timeout_s = (make_host, code, memory_mib, os.getpid(), cpus), timeout_s
        self._thread = ThreadPoolExecutor(1, "worker")
        self._process: WorkerProcess | None = None
        self._pipe: Connection | None = None
        self._is_closed = False
        self.starts = 0  # of the process so far; what it held is gone when this has grown
        self.has_failed = False  # at its last start

    def do(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work`, which calls `ask`, in the worker's thread after all work before it. Returns at once."""
        return self._thread.submit(work)

    @property
    def is_running(self) -> bool:
        """Whether there is a process, which may be about to end. In the worker's thread."""
        return self._process is not None and self._process.is_alive()

    def ensure_running(self) -> None:
        """Starts the process, unless it runs. In the worker's thread. Raises WorkerStartError."""
        if self.is_running:
            return
        self._kill()
        self.starts += 1
        try:
            pipe, theirs = get_context("spawn").Pipe()
            process = WorkerProcess(target=serve, args=(theirs, *self._given), daemon=True)
            process.start()
        except OSError as error:  # of processes, files or memory, of which the next start may find enough
            self.has_failed = True
            raise WorkerStartError(f"a worker did not start: {error}") from error
        self._process, self._pipe = process, pipe
        theirs.close()  # or its death would not end the pipe
        if self._is_closed:  # `close` found no process to kill
            self._kill()
            raise WorkerStartError("the workers are closed")
        try:
            problem = self._receive(_START_TIMEOUT_S)
        except WorkerError as error:
            problem = str(error)
        self.has_failed = problem is not None
        if self.has_failed:
            self._kill()
            raise WorkerStartError(f"a worker did not start: {problem}")

    def ask(self, request: object, num_calls: int = 1) -> Any:
        """The worker's answer, within the timeout a call of the user's code. Starts it, if need be. In its thread.

        Raises WorkerError.
        """
        self.ensure_running()
        return self.ask_running(request, num_calls)

    def ask_running(self, request: object, num_calls: int = 1) -> Any:
        """`ask` of the process that was there before: WorkerLostError where it has ended."""
        if self._pipe is None or not self.is_running:
            raise WorkerLostError("the worker has ended")
        try:
            self._pipe.send(request)
        except OSError:
            raise WorkerLostError(self._how_it_ended()) from None
        is_good, value = self._receive(self._timeout_s * num_calls)
        if not is_good:
            raise WorkerError(value)
        return value

    def close(self) -> None:
        """Kills the process, whatever it does, and ends the thread."""
        self._is_closed = True
        process = self._process  # the thread may be replacing it
        if process is not None:
            process.kill_group()
        self._thread.shutdown(cancel_futures=True)
        self._kill()

    def _receive(self, timeout_s: float) -> Any:
        assert self._pipe is not None
        try:
            if self._pipe.poll(timeout_s):
                return self._pipe.recv()
        except (EOFError, OSError):
            raise WorkerLostError(self._how_it_ended()) from None
        self._kill()
        raise WorkerLateError(f"no answer within {timeout_s:g} s")

    def _how_it_ended(self) -> str:
        process = self._process
        assert process is not None
        process.join(1.0)  # its pipe ends a moment before it does
        code = process.exitcode
        self._kill()
        return ended(code)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill_group()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None
