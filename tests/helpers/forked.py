"""Runs of one rank as forks of a process that has imported everything once: a run then takes a second and not ten.

    test      one JSON line: {"module", "argv", "log"} ----> server: forks; the child calls module.main(argv)
    test      <---- {"pid"}     ...     {"wait": pid} ----> server     <---- {"code"}
The children are whole processes with an MPI of their own, to be killed, stopped and traced like any other.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.helpers.mpi import ROOT, rank_environment

# Not mpi4py, which starts MPI when it is imported: each child does that.
_MODULES = (
    "megatron_tlt.cli.main",
    "megatron_tlt.trainer.setup",
    "megatron_tlt.trainer.loop",
    "megatron_tlt.actor.policy",
    "transformers",
)


class Run:
    """One run under way, or done."""

    def __init__(self, server: ForkServer, pid: int, log: Path):
        self._server, self.pid, self._log = server, pid, log

    @property
    def stdout(self) -> str:
        """Its output so far, stdout and stderr."""
        return self._log.read_text() if self._log.exists() else ""

    def wait(self) -> int:
        """Its exit status; a negative one is the signal that ended it."""
        code: int = self._server.ask({"wait": self.pid})["code"]
        return code


class ForkServer:
    """Use as a context manager."""

    def __init__(self, folder: Path):
        self._folder, self._count = folder, 0

    def __enter__(self) -> ForkServer:
        code = "from tests.helpers.forked import serve; serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=rank_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:  # a machine with other things to do
            self._process.kill()
            self._process.wait()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The server's answer to one request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def start(self, module: str, *argv: object) -> Run:
        """Begins `module.main(argv)` in a process of its own."""
        self._count += 1
        log = self._folder / f"run-{self._count}.log"
        answer = self.ask({"module": module, "argv": [str(a) for a in argv], "log": str(log)})
        return Run(self, answer["pid"], log)

    def run(
        self, *argv: object, module: str = "megatron_tlt.cli.main", check: bool = True
    ) -> tuple[int, str]:
        """`megatron-tlt ARGV`, to its end: exit status and output. With `check` a failure fails the test."""
        run = self.start(module, *argv)
        code = run.wait()
        assert not check or code == 0, f"{argv} ended with {code}:\n{run.stdout[-6000:]}"
        return code, run.stdout


def serve() -> None:
    """The server: forks on request until its input ends, then kills what still runs."""
    for name in _MODULES:
        importlib.import_module(name)
    children: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            children.discard(request["wait"])
            answer = {"code": os.waitstatus_to_exitcode(status)}
        else:
            pid = os.fork()
            if not pid:
                _child(request)
            children.add(pid)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)
    for pid in children:
        os.kill(pid, 9)
    os._exit(0)  # taking all the modules down would take seconds


def _child(request: dict[str, Any]) -> None:
    """Never returns."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for place, file in ((0, null), (1, log), (2, log)):
        os.dup2(file, place)
    code = 1
    try:
        code = importlib.import_module(request["module"]).main(request["argv"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  a fork must not go on as its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
