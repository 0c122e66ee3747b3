"""MPI on two nodes: what a rank did before must not matter."""

import subprocess
import sys

import pytest

from tests.helpers.mpi import ROOT, rank_environment
from tests.integration.slurm.scenarios import PATIENCE_S

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def test_ranks_with_a_heap_full_of_data_start_on_two_nodes(cluster):
    """MPICH sends 4 KiB that it has not written through Slurm's pmi2 plugin, which takes short lines only."""
    words = ["srun", "-N2", "-n2", "--ntasks-per-node=1", "--mpi=pmi2", "--kill-on-bad-exit=1", "--time=20"]
    worker = [sys.executable, "-m", "mpi4py", str(ROOT / "tests/integration/workers/start_dirty.py")]
    env = {**cluster.env, "PYTHONPATH": rank_environment()["PYTHONPATH"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, *worker], env=env, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("world of 2") == 2, done.stderr
