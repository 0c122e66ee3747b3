"""Kills at random moments, each resumed: `workers/random_kills.py --kills 200` does it by the hundred."""

import json
import random
import subprocess
import sys

import pytest

from tests.helpers.mpi import ROOT, rank_environment

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.nightly]


def test_a_run_killed_six_times_equals_one_left_alone(tmp_path):
    seed = str(random.randrange(10**6))  # another day, other moments; a failure shows it
    program = ROOT / "tests/integration/workers/random_kills.py"
    command = [sys.executable, str(program), "--kills", "6", "--seed", seed, "--folder", str(tmp_path / "runs")]
    done = subprocess.run(command, env=rank_environment(), capture_output=True, text=True)
    assert done.returncode == 0, (seed, done.stdout[-2000:], done.stderr[-2000:])
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["different"] == [] and row["same_metrics"] and row["resumes"] == 7
    assert row["tensors"] > 20 and row["num_steps"] >= 4
    assert sum(row["phases"].values()) == 6
