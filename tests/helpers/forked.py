"""Ranks as forks of a process that has imported everything once: a start takes a tenth of a second and not ten.

    mpiexec starts `stub.py` as its ranks; a test starts a run of one rank itself (`mpi.start_one`):
    stub or test  ---- {"argv", "env", "cwd"} and open files ---->  server: forks; the child is `python -m mpi4py ARGV`
                  <---- pid        ...        exit status ----      (killed if the connection ends before it)
The children are whole processes with an MPI of their own, to be killed, stopped and traced like any other.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import select
import shutil
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

import mpi4py.run
import numpy as np

# Not mpi4py.MPI, which starts MPI when it is imported: each child does that.
_MODULES = (
    "megatron_tlt.cli.main",
    "megatron_tlt.trainer.setup",
    "megatron_tlt.trainer.loop",
    "megatron_tlt.actor.policy",
    "torch._dynamo",
    "torch.onnx",
    "rich.live",
    "transformers.models.auto.tokenization_auto",
    "megatron_tlt.algorithms.build",
)


def serve(path: str) -> NoReturn:
    """The server: forks on request until its input ends, then kills what still runs."""
    for name in _MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    children: dict[int, tuple[int, socket.socket]] = {}  # pidfd: pid, its connection
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        os.write(1, b".")
        while True:
            ends = {connection.fileno(): fd for fd, (_, connection) in children.items()}
            ready, _, _ = select.select([0, listener, *children, *ends], [], [])
            if 0 in ready:
                break
            for fd in {ends.get(r, r) for r in ready} & children.keys():
                _end(fd, *children.pop(fd))
            if listener in ready:
                connection, _ = listener.accept()
                if pid := _forked(connection):
                    children[os.pidfd_open(pid)] = pid, connection
    for pid, _ in children.values():
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(Path(path).parent)
    os._exit(0)  # taking all the modules down would take seconds


def _end(fd: int, pid: int, connection: socket.socket) -> None:
    """Of a child that has ended, or whose client has."""
    if not select.select([fd], [], [], 0)[0]:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(fd)
    with connection, contextlib.suppress(OSError):
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _forked(connection: socket.socket) -> int:
    """The child's pid; 0 for `stub.settle`."""
    text, files, _, _ = socket.recv_fds(connection, 1 << 18, 16)
    pid = os.fork() if files else 0
    if files and not pid:
        _child(json.loads(text), files)
    for file in files:
        os.close(file)
    with contextlib.suppress(OSError):
        connection.send(str(pid).encode())
    return pid


def _child(request: dict[str, Any], files: list[int]) -> NoReturn:
    """What `python -m mpi4py ARGV` does."""
    code = 1
    try:
        high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 512) for file in files]
        os.closerange(3, 512)
        for number, file in zip(request["files"], high, strict=True):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(request["env"])
        wanted = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[1:1] = [path for path in wanted if path and path not in sys.path]  # mpi4py replaces the first
        os.chdir(request["cwd"])
        random.seed()
        np.random.seed()
        sys.argv[:] = ["mpi4py", *request["argv"]]
        sys.executable = os.environ.get("FORKING_PYTHON", sys.executable)
        code = _run()
    except BaseException:  # noqa: BLE001  a fork must not go on as its parent
        traceback.print_exc()
    finally:
        ctypes.CDLL(None).exit(code)  # not _exit(2): MPICH takes leave of mpiexec in a handler
        raise SystemError


def _run() -> int:
    """The exit status."""
    code = 0
    try:
        mpi4py.run.main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  printed, as by the interpreter
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        if code:
            mpi.COMM_WORLD.Abort(code)
        mpi.Finalize()
    return code


if __name__ == "__main__":
    serve(sys.argv[1])
