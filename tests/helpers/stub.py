"""Stands for a process that the server of `forked.py` forks: passes on files, environment, signals; ends as it does.

`python -I -S stub.py SOCKET [-m MODULE | SCRIPT] ARGUMENTS`: starts in milliseconds, as it imports no package.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time

_PASSED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGCONT")


class Fork:
    """A process forked by the server at `path`, which runs `python -m mpi4py ARGV`. `files`: its file descriptors."""

    def __init__(
        self, path: str, argv: list[str], files: dict[int, int], env: dict[str, str], cwd: str | os.PathLike[str]
    ):
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(path)
        request = {"argv": argv, "env": env, "cwd": os.fspath(cwd), "files": list(files)}
        socket.send_fds(self._server, [json.dumps(request).encode()], list(files.values()))
        self.pid = int(self._server.recv(64))

    def wait(self) -> int:
        """Its exit status; a negative one is the signal that ended it."""
        return int(self._server.recv(64))


def settle(path: str) -> None:
    """Waits until the server has ended every process whose stub is dead."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        server.send(b"settle")
        server.recv(64)


def leave_together(folder: str) -> None:
    """Returns in all stubs of a job at one time, after the last one's call: mpiexec kills the others when one ends."""
    rank, size = (int(os.environ.get(name, default)) for name, default in (("PMI_RANK", "0"), ("PMI_SIZE", "1")))
    paths = [f"{folder}/left-{os.getppid()}-{r}" for r in range(size)]
    with open(paths[rank], "w"):
        give_up = time.time() + 10.0
    while not all(map(os.path.exists, paths)) and time.time() < give_up:
        time.sleep(0.01)
    last = max(os.stat(path).st_mtime for path in paths if os.path.exists(path))
    time.sleep(max(0.0, last + 0.5 - time.time()))


def main() -> None:
    files = [0, 1, 2, *(int(os.environ[name]) for name in ("PMI_FD",) if name in os.environ)]
    fork = Fork(sys.argv[1], sys.argv[2:], {file: file for file in files}, dict(os.environ), os.getcwd())

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended; its status is on its way
            os.kill(fork.pid, number)

    for name in _PASSED_ON:
        signal.signal(getattr(signal, name), pass_on)
    code = fork.wait()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    if code in (2, 75):  # of all ranks: a refusal, and a run that a signal ended
        leave_together(os.path.dirname(sys.argv[1]))
    os._exit(code)


if __name__ == "__main__":
    main()
