"""A few kills at random moments, as benchmarks/bench_resumes.py does by the hundred."""

import json
import random
import subprocess
import sys

import pytest

from tests.helpers.mpi import ROOT, rank_environment

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.nightly]


def test_a_run_killed_six_times_equals_one_left_alone(tmp_path):
    seed = str(random.randrange(10**6))  # another day, other moments; a failure shows it
    command = [sys.executable, str(ROOT / "benchmarks/bench_resumes.py"), "--quick", "--seed", seed]
    command += ["--folder", str(tmp_path / "runs"), "--out", str(tmp_path / "r.json")]
    done = subprocess.run(command, env=rank_environment(), capture_output=True, text=True)
    assert done.returncode == 0, (seed, done.stdout[-2000:], done.stderr[-2000:])
    record = json.loads((tmp_path / "r.json").read_text())
    (row,) = record["rows"]
    assert record["summary"] == {"identical": 1, "resumes": 7}
    assert row["tensors"] > 20 and row["num_steps"] >= 4
    assert sum(row["phases"].values()) == 6
