"""Start real MPI ranks from a test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MPIEXEC = Path(sys.executable).parent / "mpiexec"


def rank_environment() -> dict[str, str]:
    """One thread a rank, no outer launcher's variables, the repository importable."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "PMIX_", "OMPI_", "SLURM_"))}
    env.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONUNBUFFERED="1", TOKENIZERS_PARALLELISM="false")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    return env


def run_ranks(
    ranks: int,
    script: str | list[str],
    *args: str,
    timeout: float = 300,
    check: bool = True,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m mpi4py SCRIPT args` on `ranks` ranks; returns its output, stdout and stderr together.

    `script` is a path relative to the repository, or a list such as ["-m", "megatron_tlt"].
    With `check`, a non-zero exit fails the test and shows the output.
    """
    target = [str(ROOT / script)] if isinstance(script, str) else script
    launcher = [str(MPIEXEC), "-n", str(ranks), sys.executable, "-m", "mpi4py", *target, *args]
    done = subprocess.run(
        launcher,
        env={**rank_environment(), **(env or {})},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    if check and done.returncode:
        raise AssertionError(
            f"{ranks} ranks of {target} ended with {done.returncode}:\n{done.stdout[-6000:]}"
        )
    return done
