"""Who started this process: mpiexec, srun, or nobody. The only reader of launch environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """What the launcher promised. `size` is None where the launcher does not say."""

    launcher: str
    size: int | None
    local_rank: int | None


# (variable that proves the launcher, its name, world size, local rank), most specific first
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "mpiexec (Open MPI)", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "mpiexec", "PMI_SIZE", "MPI_LOCALRANKID"),
)


def detect_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Reads the launcher's promise from the environment.

    `srun` counts only inside a job step (SLURM_STEP_ID is set by sbatch's shell too, so SLURM_PROCID decides
    together with SLURM_STEP_NUM_TASKS, which only a step has).
    """
    env = os.environ if environ is None else environ
    if "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env and env.get("SLURM_STEP_ID") != "4294967291":
        # Inside mpiexec within a batch script the innermost launcher (PMI) is the one to believe.
        if "PMI_SIZE" not in env or env["PMI_SIZE"] == env["SLURM_STEP_NUM_TASKS"]:
            return Launch("srun", int(env["SLURM_STEP_NUM_TASKS"]), _int(env.get("SLURM_LOCALID")))
    for proof, name, size, local in _LAUNCHERS:
        if proof in env:
            return Launch(name, _int(env.get(size)), _int(env.get(local)))
    return Launch("none", 1, 0)


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
