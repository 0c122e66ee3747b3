"""Start real MPI ranks from a test, as forks of a process that has imported everything: see `forked.py`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from tests.helpers import stub

ROOT = Path(__file__).resolve().parents[2]
MPIEXEC = Path(sys.executable).parent / "mpiexec"


def rank_environment() -> dict[str, str]:
    """One thread a rank, no outer launcher's variables, the repository importable."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "PMIX_", "OMPI_", "SLURM_"))}
    env.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONUNBUFFERED="1", TOKENIZERS_PARALLELISM="false")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    return env


@functools.cache
def server() -> str:
    """The socket of the server of this process, which ends with it."""
    folder = tempfile.mkdtemp(prefix="forks-")
    path = f"{folder}/socket"
    process: Any = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.forked", path],
        cwd=ROOT,
        env=rank_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    atexit.register(process.communicate)
    assert process.stdout.read(1) == b"."
    return path


class Run:
    """A run of one rank, under way or done."""

    def __init__(self, fork: stub.Fork, log: Path):
        self._fork, self.pid, self._log = fork, fork.pid, log

    @property
    def stdout(self) -> str:
        """Its output so far, stdout and stderr."""
        return self._log.read_text()

    def wait(self) -> int:
        """Its exit status; a negative one is the signal that ended it."""
        return self._fork.wait()


def start_one(*argv: object, **env: str) -> Run:
    """Begins one rank without mpiexec: `megatron-tlt ARGV`, or ARGV is a script or -c and code, with its arguments."""
    target = [] if str(argv[0]).endswith((".py", "-c")) else ["-m", "megatron_tlt"]
    handle, log = tempfile.mkstemp(prefix="run-", suffix=".log", dir=Path(server()).parent)
    with open(os.devnull, "rb") as null, open(handle, "wb") as file:
        files = {0: null.fileno(), 1: file.fileno(), 2: file.fileno()}
        return Run(stub.Fork(server(), [*target, *map(str, argv)], files, rank_environment() | env, ROOT), Path(log))


def run_one(*argv: object, check: bool = True, **env: str) -> tuple[int, str]:
    """`start_one`, to its end: exit status and output. With `check` a failure fails the test."""
    begun = start_one(*argv, **env)
    code = begun.wait()
    assert not check or code == 0, f"{argv} ended with {code}:\n{begun.stdout[-6000:]}"
    return code, begun.stdout


def fork_command() -> list[str]:
    """A command line that takes the place of `python -m mpi4py`."""
    return [sys.executable, "-I", "-S", stub.__file__, server()]


def forking_python(folder: Path) -> Path:
    """An executable for Python whose ranks (`-m mpi4py`), and what it starts with `-W ignore`, are forks; so are the
    commands (`-m megatron_tlt`) that these start by `sys.executable`.
    """
    path, fork = folder / "forking-python", shlex.join(fork_command())
    begin = f'export FORKING_PYTHON={shlex.quote(str(path))}; exec {fork} "$@"'
    cases = f"'-m mpi4py' | '-W ignore') shift 2; {begin} ;;\n'-m megatron_tlt') {begin} ;;"
    path.write_text(f'#!/bin/sh\ncase "$1 $2" in\n{cases}\nesac\nexec {shlex.quote(sys.executable)} "$@"\n')
    path.chmod(0o755)
    return path


def launcher(ranks: int) -> list[str]:
    """A command line that takes the place of `mpiexec -n RANKS python -m mpi4py`.

    Where ranks end with an error at once, mpiexec may kill a fork's stub before it can pass the exit code on, and
    reports 9; not with 75, with which all ranks end together.
    """
    return [str(MPIEXEC), "-n", str(ranks), *fork_command()]


def ranks_of(job: subprocess.Popen[Any]) -> list[psutil.Process]:
    """The stubs of the ranks of a job under way, with which these end."""
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(job.pid).children(recursive=True)
        return [process for process in children if "megatron_tlt" in process.cmdline()]
    return []


def run_ranks(
    ranks: int,
    script: str | list[str],
    *args: str,
    timeout: float = 300,
    check: bool = True,
    env: dict[str, str] | None = None,
    first_path: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m mpi4py SCRIPT args` on `ranks` ranks; returns its output, stdout and stderr together.

    `script` is a path relative to the repository, or a list such as ["-m", "megatron_tlt"]. `first_path` comes first on
    the ranks' sys.path, and they are no forks then: what it has may have to be there when megatron is imported.
    With `check`, a non-zero exit fails the test and shows the output.
    """
    target = [str(ROOT / script)] if isinstance(script, str) else script
    settings = rank_environment()
    if first_path is None:
        start = launcher(ranks)
    else:
        start = [str(MPIEXEC), "-n", str(ranks), sys.executable, "-m", "mpi4py"]
        settings["PYTHONPATH"] = os.pathsep.join([str(first_path), settings["PYTHONPATH"]])
    done = subprocess.run(
        [*start, *target, *args],
        env={**settings, **(env or {})},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    if first_path is None:
        stub.settle(server())
    if check and done.returncode:
        raise AssertionError(f"{ranks} ranks of {target} ended with {done.returncode}:\n{done.stdout[-6000:]}")
    return done
