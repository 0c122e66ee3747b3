"""Runs of `megatron-tlt train` in which something happens to one rank."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.mpi import run_ranks

WORKER = "tests/integration/workers/train_fault.py"


def train_with_fault(
    config: Path, run_dir: Path, fault: dict, *overrides: str, launcher: tuple[str, ...] = ()
):
    """Two ranks; `fault` as in the worker's `Fault`. `launcher` are options of mpiexec."""
    arguments = [json.dumps(fault), "train", str(config), f"train.run_dir={run_dir}", *overrides]
    return run_ranks(2, WORKER, *arguments, check=False, timeout=290, options=launcher)


def train(config: Path, run_dir: Path, *overrides: str) -> str:
    """Trains on two ranks without a fault; returns their output."""
    return run_ranks(
        2, ["-m", "megatron_tlt"], "train", str(config), f"train.run_dir={run_dir}", *overrides
    ).stdout
