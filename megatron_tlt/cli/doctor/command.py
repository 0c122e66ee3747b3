"""`megatron-tlt doctor`: whether this machine is fit, what is missing, and how to get it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.exit_codes import FAILED, OK

if TYPE_CHECKING:
    import argparse

    from megatron_tlt.cli.doctor.findings import Finding


def add_doctor(commands: Any) -> None:
    """Adds the command to the parser."""
    text = "say what this machine lacks to run, and how to get it"
    about = f"{text}. Starts two ranks for a moment; changes nothing. Exit status: 0 if all that is required is here."
    command = commands.add_parser("doctor", help=text, description=about)
    command.add_argument(
        "--run-dir", type=Path, default=Path("runs"), help="where runs will go (default: runs)"
    )
    command.add_argument("--trtllm-python", help="rollout.trtllm.python, to look for TensorRT-LLM there")
    command.add_argument(
        "--launcher", help="what starts two ranks, as 'srun -n 2 --mpi=pmi2' (default: mpiexec -n 2)"
    )
    command.add_argument("--json", action="store_true", help="as JSON")
    command.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from megatron_tlt.cli.doctor.findings import passed, render

    findings = examine(args.run_dir, args.trtllm_python, args.launcher)
    print(json.dumps([asdict(f) for f in findings], indent=2) if args.json else render(findings))
    return OK if passed(findings) else FAILED


def examine(run_dir: Path, trtllm_python: str | None, launcher: str | None) -> list[Finding]:
    """Every check's finding, in the order in which their failures explain each other.

    Takes as long as two ranks need to start (seconds).
    """
    from megatron_tlt.cli.doctor import machine, software

    gpu = machine.check_gpu()
    mpi = software.check_mpi()
    has_gpu = gpu.status in ("ok", "failed")
    return [
        software.check_python(),
        software.check_libraries(),
        software.check_compiler(),
        gpu,
        software.check_torch(has_gpu),
        software.check_transformer_engine(has_gpu),
        software.check_apex(),
        software.check_trtllm(trtllm_python),
        mpi,
        machine.check_slurm(mpi.detail),
        machine.check_disk(run_dir),
        machine.check_shared_memory(),
        machine.check_ports(),
        machine.check_two_ranks(launcher, software.find_mpiexec()),
    ]
