"""The launcher of this process: mpiexec, srun or none. The only reader of launch environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """The launcher's announcement. `size` is None where the launcher does not give it."""

    launcher: str
    size: int | None
    rank: int | None
    local_rank: int | None


# (launcher, world size, rank, local rank): the first whose size is set is the one that started us
_LAUNCHERS = (
    ("mpiexec (Open MPI)", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpiexec", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
)
_BATCH_STEP = "4294967291"  # Slurm's step id of the batch script itself, where only one process runs


def detect_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Reads the launcher's announcement from the environment.

    `srun` counts only inside a step of its own: a batch script's shell carries most SLURM_ variables too.
    Where srun itself provides PMI (--mpi=pmi2) both are set and agree; where mpiexec runs inside an allocation
    they differ, and the inner launcher counts.
    """
    env = os.environ if environ is None else environ
    promised = env.get("SLURM_STEP_NUM_TASKS")
    in_step = promised is not None and "SLURM_PROCID" in env and env.get("SLURM_STEP_ID") != _BATCH_STEP
    if in_step and env.get("PMI_SIZE", promised) == promised:
        return Launch("srun", _int(promised), _int(env.get("SLURM_PROCID")), _int(env.get("SLURM_LOCALID")))
    for name, size, rank, local in _LAUNCHERS:
        if size in env:
            return Launch(name, _int(env[size]), _int(env.get(rank)), _int(env.get(local)))
    return Launch("none", 1, 0, 0)


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
