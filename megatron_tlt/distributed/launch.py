"""The launcher of this process: mpiexec, srun or none. The only reader of launch environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_tlt.errors import ConfigError

# For our own mpiexec: its ranks on this machine, also within an allocation of Slurm, where it would start them by srun.
ON_THIS_MACHINE = {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user"}


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
# Slurm's ids of the steps of a batch script, a shell of salloc and an adopted process, where one process runs.
_SHELL_STEPS = ("4294967291", "4294967290", "4294967292")


def detect_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Reads the launcher's announcement from the environment.

    `srun` counts only inside a step of its own: the shells of batch scripts and salloc carry most SLURM_ variables too.
    Where srun itself provides PMI (--mpi=pmi2) both are set and agree; where an mpiexec runs inside an allocation or
    a step's shell (srun --pty bash) they differ, and the inner launcher counts.
    """
    env = os.environ if environ is None else environ
    promised = env.get("SLURM_STEP_NUM_TASKS")
    in_step = promised is not None and "SLURM_PROCID" in env and env.get("SLURM_STEP_ID") not in _SHELL_STEPS
    if in_step and all(env.get(size, promised) == promised for _, size, _, _ in _LAUNCHERS):
        return Launch("srun", _int(promised), _int(env.get("SLURM_PROCID")), _int(env.get("SLURM_LOCALID")))
    for name, size, rank, local in _LAUNCHERS:
        if size in env:
            return Launch(name, _int(env[size]), _int(env.get(rank)), _int(env.get(local)))
    return Launch("none", 1, 0, 0)


def foreign_launch(environ: Mapping[str, str] | None = None) -> str | None:
    """The problem with a start by torchrun, accelerate or deepspeed, whose processes are runs of one rank each to MPI;
    None: there is none.
    """
    env = os.environ if environ is None else environ
    size = _int(env.get("WORLD_SIZE"))
    if detect_launch(env).launcher != "none" or size is None or size < 2:
        return None
    ranks = "ranks are started by launch/local.sh -n RANKS, mpiexec or srun"
    return f"WORLD_SIZE = {size}, as torchrun sets it: {ranks}; for one process unset WORLD_SIZE"


def cpu_threads() -> int:
    """CPU threads of this rank: OMP_NUM_THREADS (of a list the first), which launch/ and slurm/ set; 1 without it.

    Raises ConfigError.
    """
    text = os.environ.get("OMP_NUM_THREADS", "1")
    count = _int(text.split(",")[0].strip())
    if not count:
        raise ConfigError.of("OMP_NUM_THREADS", text, "must be a number of threads above 0")
    return count


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
