"""The engine's child process on the rank's side: start, messages, liveness, end.

The rank listens on a Unix socket in a directory that only this user may enter; the child connects, sends its protocol
and engine version, and then a heartbeat every few seconds. A dead or silent child, or one that sends anything but
whole messages, is killed with its process group and reported with the end of its log.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_tlt.backends.wire import PROTOCOL, FrameReader, WireError, frame
from megatron_tlt.distributed.child_signals import signals_blocked
from megatron_tlt.errors import BackendError

Message = dict[str, Any]
# Variables of a launcher for its ranks: the engine starts MPI or Ray of its own and must not join the ranks' job.
_LAUNCHER = ("PMI_", "PMI2_", "PMIX_", "MPI_", "MPIR_", "MPICH_", "OMPI_", "HYDRA_", "HYDI_", "SLURM_")
_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # of our environment, not of the engine's
_LONGEST_PATH = 107  # of a Unix socket on Linux
_TAIL_BYTES = 4000
_TICK_S = 0.25
_END_S = 30.0


@dataclass(frozen=True)
class EngineLaunch:
    """What is started, in which environment, and how long it may take."""

    name: str  # the engine's, as in messages
    section: str  # path of its configuration
    package: tuple[str, Path]  # the directory of Python files that it runs, and the name that it has there
    module: str
    python: str
    version: str  # of the engine; another one is refused
    heartbeat_s: float
    silence_s: float
    start_s: float
    environment: Mapping[str, str] = field(default_factory=dict)  # more variables


def child_environment(ours: Mapping[str, str], package: str, more: Mapping[str, str]) -> dict[str, str]:
    """The environment of the engine's process: ours without launcher and Python, and `more`. Pure."""
    kept = {
        name: value for name, value in ours.items() if not name.startswith(_LAUNCHER) and name not in _PYTHON
    }
    return {**kept, "PYTHONPATH": package, **more}


class EngineProcess:
    """The child process and the socket to it. Used by one thread of the rank."""

    def __init__(self, launch: EngineLaunch, variables: Mapping[str, str] = MappingProxyType({})):
        """Starts the child and shakes hands. `variables`: of its environment, over all others. Raises BackendError."""
        self.launch = launch
        self._directory = Path(tempfile.mkdtemp(prefix="tlt-"))  # 0700
        self.log = self._directory / "engine.log"
        self._reader = FrameReader()
        self._socket: socket.socket | None = None
        self._calls = 0
        self._seen = time.monotonic()
        self.answers: list[Message] = []  # came while a reply was waited for
        self._child: subprocess.Popen[bytes] | None = None
        listener = self._listen()
        try:
            self._child = self._spawn(variables)
            self._socket = self._accept(listener)
            self.engine_version = self._handshake()
        finally:
            listener.close()

    def _listen(self) -> socket.socket:
        path = str(self._directory / "socket")
        if len(os.fsencode(path)) > _LONGEST_PATH:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise BackendError(f"{path} is too long for a Unix socket: set TMPDIR to a shorter directory")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(1)
        return listener

    def _spawn(self, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        launch = self.launch
        name, place = launch.package
        (self._directory / name).symlink_to(place)
        environment = child_environment(os.environ, str(self._directory), launch.environment) | dict(variables)
        try:
            # Signals to end are for the rank; Slurm sends them to every process, and the engine would be gone at once.
            with self.log.open("wb") as log, signals_blocked():
                # Not `resolve`: an environment's python is a link, and is known by the link's place.
                return subprocess.Popen(
                    [os.path.abspath(launch.python), "-m", launch.module, str(self._directory / "socket")],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=self._directory,
                    start_new_session=True,  # so that killing it also kills what it started
                )
        except OSError as error:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise BackendError(
                f"{launch.section}.python = {launch.python!r} cannot be started: {error}"
            ) from error

    def _accept(self, listener: socket.socket) -> socket.socket:
        deadline = time.monotonic() + self.launch.start_s
        listener.settimeout(_TICK_S)
        while True:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                self._check_alive("before its hello")
                if time.monotonic() > deadline:
                    raise self.failure(f"sent no hello within {self.launch.start_s:g} s") from None
                continue
            connection.settimeout(_TICK_S)
            return connection

    def _handshake(self) -> str:
        hello = self._next(self.launch.start_s)
        if hello["type"] != "hello" or hello.get("protocol") != PROTOCOL:
            raise self.failure(f"has protocol {hello.get('protocol')!r}, this side has {PROTOCOL}")
        engine = str(hello.get("engine"))
        launch = self.launch
        if engine != launch.version:
            raise self.failure(f"is {launch.name} {engine}, {launch.section}.version is {launch.version}")
        self.send({"type": "hello", "protocol": PROTOCOL, "heartbeat_s": self.launch.heartbeat_s})
        return engine

    @property
    def pid(self) -> int:
        """The child's process id. Raises BackendError once it is killed or closed."""
        if self._child is None:
            raise BackendError(f"the {self.launch.name} engine has been killed or closed")
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        """Whether the child has not been killed or closed."""
        return self._child is not None

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message. Raises BackendError if the child is gone or does not read, WireError if it is too long."""
        data = frame(message)
        assert self.pid and self._socket is not None
        self._socket.settimeout(self.launch.silence_s)
        try:
            self._socket.sendall(data)
        except TimeoutError as error:
            raise self.failure(f"took no message for {self.launch.silence_s:g} s") from error
        except OSError as error:
            raise self.failure(self._exit_text("hung up")) from error
        finally:
            if self._socket is not None:
                self._socket.settimeout(_TICK_S)

    def call(self, kind: str, *, patience: float | None = None, **fields: Any) -> Message:
        """Sends a request and waits for its reply; answers that come meanwhile are kept in `answers`.

        `patience`: seconds without a heartbeat in place of the launch's `silence_s`. Raises BackendError.
        """
        self._calls += 1
        number = self._calls
        self.send({"type": kind, "call": number, **fields})
        while True:
            message = self._next(patience)
            if message["type"] == "answer":
                self.answers.append(message)
            elif message["type"] == "reply" and message.get("call") == number:
                return message
            elif message["type"] in ("reply", "error") and 0 < int(message.get("call") or 0) < number:
                continue  # of a call that was interrupted here
            elif message["type"] == "error" and message.get("call") == number:
                raise BackendError(f"{self.launch.name} could not {kind}: {message.get('message')}")
            else:
                raise self.failure(f"sent {message['type']!r} while {kind} {number} was waited for")

    def next_answer(self) -> Message:
        """The next answer, or a heartbeat between answers. Raises BackendError."""
        if self.answers:
            return self.answers.pop(0)
        message = self._next(None, beats=True)
        if message["type"] not in ("answer", "beat"):
            raise self.failure(f"sent {message['type']!r} while answers were waited for")
        return message

    def _next(self, patience: float | None, beats: bool = False) -> Message:
        """The next message; heartbeats are skipped without `beats`. Silence counts from now at the earliest."""
        assert self.pid and self._socket is not None
        limit = patience or self.launch.silence_s
        self._seen = time.monotonic()
        while True:
            try:
                message = self._reader.next()
            except WireError as error:
                raise self.failure(f"sent no valid message: {error}") from error
            if message is not None:
                if beats or message["type"] != "beat":
                    return message
                continue
            self._read_more(limit)

    def _read_more(self, limit: float) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 20)
        except TimeoutError:
            self._check_alive("without a message")
            if time.monotonic() - self._seen > limit:
                raise self.failure(f"sent no heartbeat for {limit:g} s") from None
            return
        except OSError as error:
            raise self.failure(self._exit_text("hung up")) from error
        if not data:
            raise self.failure(self._exit_text("hung up"))
        self._seen = time.monotonic()
        self._reader.feed(data)

    def _check_alive(self, when: str) -> None:
        assert self._child is not None
        if self._child.poll() is not None:
            raise self.failure(f"{self._exit_text('ended')} {when}")

    def _exit_text(self, otherwise: str) -> str:
        assert self._child is not None
        try:
            code = self._child.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return otherwise
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def failure(self, what: str) -> BackendError:
        """Kills the child; returns the error with what it did and the end of its log. The log stays on disk."""
        pid = self._child.pid if self._child is not None else None
        self._kill()
        tail = self._tail()
        shown = f"the end of its log ({self.log}):\n{tail}" if tail else f"its log ({self.log}) is empty"
        return BackendError(f"the {self.launch.name} engine (process {pid}) {what}; {shown}")

    def _tail(self) -> str:
        with suppress(OSError), self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").strip()
        return ""

    def _kill(self) -> None:
        if self._child is not None:
            with suppress(ProcessLookupError, PermissionError):  # the whole group is gone
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
            self._child = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Shuts the child down, by force if that takes too long; removes its directory. A second call does nothing."""
        if self._child is None:
            return
        try:
            self.call("shutdown", patience=_END_S)
            self._child.wait(timeout=_END_S)
        except (BackendError, subprocess.TimeoutExpired):
            pass  # it is killed below
        self._kill()
        shutil.rmtree(self._directory, ignore_errors=True)
