"""All checks, in the order in which their failures explain each other."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_tlt.cli.doctor import machine, software
from megatron_tlt.cli.doctor.report import Answer, Finding, ask, last_line
from megatron_tlt.cli.doctor.two_ranks import SAID

_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Wishes:
    """Options of `megatron-tlt doctor`: about the runs to come."""

    run_dir: Path = Path("runs")
    trtllm_python: str | None = None
    launcher: str | None = None
    """Command that starts two ranks, as `srun -n 2 --mpi=pmi2`; None: mpiexec."""


def examine(wishes: Wishes) -> list[Finding]:
    """Every check's finding; takes as long as two ranks need to start (seconds)."""
    gpu = machine.check_gpu()
    has_gpu = gpu.status in ("ok", "failed")
    mpiexec = software.find_mpiexec()
    mpi = software.check_mpi(mpiexec)
    return [
        software.check_python(),
        software.check_libraries(),
        software.check_compiler(),
        gpu,
        software.check_torch(has_gpu),
        software.check_nccl(has_gpu),
        software.check_transformer_engine(has_gpu),
        software.check_apex(has_gpu),
        software.check_trtllm(wishes.trtllm_python),
        mpi,
        machine.check_slurm(software.mpi_family(mpi.detail)),
        machine.check_disk(wishes.run_dir),
        machine.check_shared_memory(),
        machine.check_ports(),
        check_two_ranks(wishes.launcher, mpiexec),
    ]


def check_two_ranks(launcher: str | None, mpiexec: str | None) -> Finding:
    """Two ranks start, and meet through MPI and torch.distributed."""
    if launcher is None and mpiexec is None:
        return Finding(
            "two ranks", "failed", "nothing to start them with", "see the row MPI, or give --launcher"
        )
    start = shlex.split(launcher) if launcher is not None else [str(mpiexec), "-n", "2"]
    command = [
        *start,
        sys.executable,
        "-m",
        "mpi4py",
        "-m",
        "megatron_tlt.cli.doctor.two_ranks",
        str(_PATIENCE_S / 2),
    ]
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    began = time.monotonic()
    answer = ask(command, _PATIENCE_S, {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    return judge_two_ranks(answer, start, time.monotonic() - began)


def judge_two_ranks(answer: Answer, start: Sequence[str], seconds: float) -> Finding:
    """`check_two_ranks` from the output of the ranks."""
    with_ = " ".join(start)
    if answer.code == 0 and SAID in answer.out:
        line = next(line for line in answer.out.splitlines() if SAID in line)
        return Finding("two ranks", "ok", f"{line}, {seconds:.1f} s ({with_})")
    errors = [line for line in answer.err.splitlines() if "Error" in line]
    why = errors[-1].strip() if errors else last_line(answer.err) or f"exit code {answer.code}"
    hint = f"run it by hand: {with_} python -m mpi4py -m megatron_tlt.cli.doctor.two_ranks 60"
    return Finding("two ranks", "failed", why, hint)
