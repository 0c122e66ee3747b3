"""The engine's child process on the rank's side: start, messages, liveness, end.

The rank listens on a Unix socket in a directory that only this user may enter; the child connects, sends its engine's
version and type of device, and then a heartbeat every few seconds. A dead or silent child, or one that sends anything
but whole messages, is killed with its process group and reported with the end of its log.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_tlt.backends.serving import Message, WireError, line_of, message_of
from megatron_tlt.backends.transport import SharedDirectory
from megatron_tlt.errors import BackendError
from megatron_tlt.observe.log import announced
from megatron_tlt.workers.child_signals import signals_blocked
from megatron_tlt.workers.process import LAUNCHER
from megatron_tlt.workers.scratch import OF_MACHINE, show_use

_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # of our environment, not of the engine's
_TAIL_BYTES = 4000
_TICK_S = 0.25
END_S = 30.0  # of a shutdown, or of an abort where the rollout has failed, after which the child is killed
HEARTBEAT_S = 0.5  # between two signs of life of the child; vLLM's carry the lengths of running responses
SILENCE_S = 120.0  # without one, after which the child is killed: a call may hold up its event loop for long
START_S = 1800.0  # of an engine's start, which gives no sign: the first one compiles kernels; the most of any call


@dataclass(frozen=True)
class EngineLaunch:
    """The command of a child process and its environment."""

    name: str  # the engine's, as in messages
    section: str  # path of its configuration
    versions: re.Pattern[str]  # of the engine that we know how to call
    versions_text: str
    package: tuple[str, Path]  # the directory of Python files that it runs, and the name that it has there
    module: str
    python: str
    environment: Mapping[str, str]  # more variables
    device: str = "cuda"  # type of device that the engine must compute on
    remedy: str = "there is no other"  # how to get an engine for that type


def child_environment(ours: Mapping[str, str], package: str, more: Mapping[str, str]) -> dict[str, str]:
    """The environment of the engine's process: ours without launcher, Python and Megatron's; and `more`. Pure."""
    dropped = (*_PYTHON, "CUDA_DEVICE_MAX_CONNECTIONS")  # the engine's kernels need more than one hardware queue
    kept = {name: value for name, value in ours.items() if not name.startswith(LAUNCHER) and name not in dropped}
    return {**kept, "PYTHONPATH": package, **more}


class EngineProcess:
    """The child process and the socket to it. Used by one thread of the rank."""

    def __init__(self, launch: EngineLaunch, variables: Mapping[str, str] = MappingProxyType({})):
        """Starts the child and waits for its hello. `variables`: of its environment, over all others.

        Raises BackendError, and ConfigError without /dev/shm; then nothing is left but a log that is not empty.
        """
        self.launch = launch
        self.shared = SharedDirectory(launch.section)
        """For the socket and tensors on their way; both processes may write there."""
        file, name = tempfile.mkstemp(prefix=OF_MACHINE, suffix=".log")  # not in shared memory: a log grows
        os.close(file)
        self._log = Path(name)
        self._keeps_log = False
        self.responses: list[Message] = []  # came while a reply was waited for
        self._received = bytearray()
        self._silent_s = 0.0  # of waits, since the last bytes or request
        self._calls = 0
        self.engine_version = ""
        self._socket: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None
        try:
            self._socket = self._connect(variables)
            self._check_hello(self._next(START_S))
        except BaseException:
            self._end()
            raise

    def _connect(self, variables: Mapping[str, str]) -> socket.socket:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self.shared.path / "socket"))
            listener.listen(1)
            listener.settimeout(_TICK_S)
            self._child = self._spawn(variables)
            deadline = time.monotonic() + START_S
            while time.monotonic() < deadline:
                with suppress(TimeoutError):
                    connection, _ = listener.accept()
                    return connection
                self._check_alive("before its hello")
        raise self.failure(f"sent no hello within {START_S:g} s")

    def _spawn(self, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        launch, directory = self.launch, self.shared.path
        name, place = launch.package
        (directory / name).symlink_to(place)
        environment = child_environment(os.environ, str(directory), launch.environment) | dict(variables)
        # Not `resolve`: an environment's python is a link, and is known by the link's place.
        command = [os.path.abspath(launch.python), "-m", launch.module, str(directory / "socket")]
        try:
            # Signals to end are for the rank; Slurm sends them to every process, and the engine would be gone at once.
            with self._log.open("wb") as log, signals_blocked():
                show_use(log.fileno())  # also by the child, to which it goes
                return subprocess.Popen(
                    [*command, str(HEARTBEAT_S)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=directory,
                    start_new_session=True,  # so that killing it also kills what it started
                )
        except OSError as error:
            raise BackendError(f"{launch.section}.python = {launch.python!r} cannot be started: {error}") from error

    def _check_hello(self, hello: Message) -> None:
        launch, engine, device = self.launch, str(hello.get("engine")), hello.get("device")
        if hello["type"] != "hello" or launch.versions.fullmatch(engine) is None:
            raise self.failure(f"is {launch.name} {engine}, must be {launch.versions_text}: {launch.section}.python")
        if device != launch.device:
            python = f"{launch.section}.python; {launch.remedy}"
            raise self.failure(f"computes on {device}, this rank on {launch.device}: {python}")
        self.engine_version = engine

    def start(self, **arguments: Any) -> None:
        """Has the child start its engine. Raises BackendError; then nothing is left but the log that it names."""
        at_most = f"minutes at its first start, at most {START_S:g} s; log: {self._log}"
        with self.closed_on_error(), announced(f"starting {self.launch.name}", at_most):
            self.call("start", patience=START_S, **arguments)

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Closes the child where the block raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise

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
        """Sends a message. Raises BackendError if the child is gone or does not read."""
        assert self.pid and self._socket is not None
        self._socket.settimeout(SILENCE_S)
        try:
            self._socket.sendall(line_of(message))
        except TimeoutError as error:
            raise self.failure(f"took no message for {SILENCE_S:g} s") from error
        except OSError as error:
            raise self.failure(self._exit_text("hung up")) from error

    def call(self, kind: str, *, patience: float | None = None, **fields: Any) -> Message:
        """Sends a request and waits for its reply; responses that come meanwhile are kept in `responses`.

        `patience`: seconds in place of `SILENCE_S` without a heartbeat, and of `START_S` with heartbeats only, which
        the child's event loop sends also while its engine hangs. Raises BackendError.
        """
        limit = patience or START_S
        end = time.monotonic() + limit
        self._calls += 1
        number = self._calls
        self.send({"type": kind, "call": number, **fields})
        self._silent_s = 0.0
        while True:
            message = self._next(patience)
            if message["type"] == "beat":
                if time.monotonic() > end:
                    raise self.failure(f"sent heartbeats, but no reply to {kind}, for {limit:g} s")
            elif message["type"] == "response":
                self.responses.append(message)
            elif message["type"] == "reply" and message.get("call") == number:
                return message
            elif message["type"] in ("reply", "error") and 0 < int(message.get("call") or 0) < number:
                continue  # of a call that was interrupted here
            elif message["type"] == "error" and message.get("call") == number:
                raise self._refusal(kind, f"could not {kind}: {message.get('message')}")
            else:
                raise self.failure(f"sent {message['type']!r} while {kind} {number} was waited for")

    def _refusal(self, kind: str, what: str) -> BackendError:
        """The error of a call that the child has answered with one; of `start`, whose cause is in its log, its end."""
        if kind != "start":
            return BackendError(f"{self.launch.name} {what}")
        self._shut_down()
        return self.failure(what)

    def next_response(self, wait_s: float | None = None) -> Message | None:
        """The next response, or a heartbeat between responses; None: nothing has come within `wait_s`. Raises
        BackendError.
        """
        if self.responses:
            return self.responses.pop(0)
        if wait_s is not None and b"\n" not in self._received and not self._read_more(wait_s):
            return None
        message = self._next()
        if message["type"] not in ("response", "beat"):
            raise self.failure(f"sent {message['type']!r} while responses were waited for")
        return message

    def _next(self, patience: float | None = None) -> Message:
        """The next message."""
        assert self.pid
        while (end := self._received.find(b"\n")) < 0:
            self._read_more(_TICK_S, patience)
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return self._message(line)

    def _message(self, line: bytes) -> Message:
        try:
            return message_of(line)
        except WireError as error:
            raise self.failure(f"sent no valid message: {error}") from error

    def _read_more(self, wait_s: float, patience: float | None = None) -> bool:
        """Whether bytes came within `wait_s`. Raises BackendError, also where waits have heard nothing for `patience`
        seconds (None: `SILENCE_S`), all together.
        """
        assert self.pid and self._socket is not None
        self._socket.settimeout(wait_s)
        try:
            data = self._socket.recv(1 << 20)
        except TimeoutError:
            self._check_alive("without a message")
            self._silent_s += wait_s
            limit = patience or SILENCE_S
            if self._silent_s > limit:
                raise self.failure(f"sent no heartbeat for {limit:g} s") from None
            return False
        except OSError as error:
            raise self.failure(self._exit_text("hung up")) from error
        if not data:
            raise self.failure(self._exit_text("hung up"))
        self._received += data
        self._silent_s = 0.0
        return True

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
        """Kills the child; returns the error with its cause and the end of its log, whose file stays if it has text."""
        pid = self._child.pid if self._child is not None else None
        self._kill()
        tail = ""
        with suppress(FileNotFoundError), self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
            tail = log.read().decode("utf-8", "replace").strip()
        self._keeps_log = bool(tail)
        self._end()
        shown = f"the end of its log ({self._log}):\n{tail}" if tail else "its log is empty"
        return BackendError(f"the {self.launch.name} engine (process {pid}) {what}; {shown}")

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
        """Shuts the child down, by force if that takes too long; removes its files. A second call does nothing."""
        if self._child is not None:
            self._shut_down()
            self._end()

    def _shut_down(self) -> None:
        """Has the child end its engine and itself, for as long as that may take; it is killed afterwards."""
        assert self._child is not None
        with suppress(BackendError, subprocess.TimeoutExpired):
            self.call("shutdown", patience=END_S)
            self._child.wait(timeout=END_S)

    def _end(self) -> None:
        self._kill()
        self.shared.close()
        if not self._keeps_log:
            self._log.unlink(missing_ok=True)
