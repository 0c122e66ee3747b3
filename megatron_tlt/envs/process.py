"""The rank's side of one environment worker: a process, a pipe, and a thread that waits for its answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from megatron_tlt.config.env import EnvSection
from megatron_tlt.envs.worker import Request, serve
from megatron_tlt.errors import EnvError
from megatron_tlt.workers.process import WorkerProcess, ended

_START_TIMEOUT_S = 120.0
T = TypeVar("T")


class WorkerLostError(EnvError):
    """The process has died: of the request, or before it."""


class EnvWorker:
    """One worker, started with its first request and started anew after a request that it did not survive."""

    def __init__(self, section: EnvSection, *, in_thought: bool = False, cpus: Collection[int] = ()):
        """`in_thought`: see `load_environment`; `cpus`: see `set_up`."""
        self._section, self._in_thought, self._cpus = section, in_thought, cpus
        self._thread = ThreadPoolExecutor(1, "env-worker")
        self._process: WorkerProcess | None = None
        self._pipe: Connection | None = None
        self._is_closed = False
        self.starts = 0  # of the process so far; its environments are gone when this has grown
        self.load = 0  # trajectories that have been given to this worker and have not ended
        self.close_failures: list[str] = []  # of environments that have been discarded; not yet logged

    def do(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work`, which calls `ask`, in the worker's thread after all work before it. Returns at once."""
        return self._thread.submit(work)

    @property
    def is_running(self) -> bool:
        """Whether there is a process, which may be about to end. In the worker's thread."""
        return self._process is not None and self._process.is_alive()

    def ensure_running(self) -> None:
        """Starts the process, unless it runs. In the worker's thread. Raises EnvError."""
        if self.is_running:
            return
        self._kill()
        self.starts += 1
        self._pipe, theirs = get_context("spawn").Pipe()
        arguments = (theirs, self._section.model_dump_json(), self._in_thought, os.getpid(), self._cpus)
        self._process = WorkerProcess(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()  # or its death would not end the pipe
        if self._is_closed:  # `close` found no process to kill
            self._kill()
            raise EnvError("the environments are closed")
        problem = self._receive(_START_TIMEOUT_S)
        if problem is not None:
            self._kill()
            raise EnvError(f"an environment worker did not start: {problem}")

    def ask(self, request: Request) -> Any:
        """The worker's answer, within `timeout_s` a call of the environment. Starts it, if need be. In its thread.

        Raises EnvError: an error of the environment, or a worker that hung (it is killed); WorkerLostError.
        """
        self.ensure_running()
        return self.ask_running(request)

    def ask_running(self, request: Request) -> Any:
        """`ask` of the process that was there before: WorkerLostError where it has ended."""
        if self._pipe is None or not self.is_running:
            raise WorkerLostError("the worker has ended")
        try:
            self._pipe.send(request)
        except OSError:
            raise WorkerLostError(self._how_it_ended()) from None
        is_good, value = self._receive(self._section.timeout_s * request.num_calls)
        if not is_good:
            raise EnvError(value)
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
        raise EnvError(f"no answer within {timeout_s:g} s")

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
