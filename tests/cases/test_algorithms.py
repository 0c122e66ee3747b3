"""Cases of learning that users of other projects reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.mpi import run_ranks
from tests.helpers.runs import rows, write_config


@pytest.mark.mpi
@pytest.mark.slow
def test_dynamic_sampling_that_finds_no_mixed_group_says_why_and_ends(tmp_path: Path) -> None:
    """verl #953, DAPO #22: all right, some of them overlong."""
    (tmp_path / "right.py").write_text("def reward(prompt, answer, response, metadata):\n    return 1.0\n")
    config = write_config(
        tmp_path,
        train={"num_steps": 4},
        eval={"every": 0},
        rewards={"functions": [{"name": "python", "path": f"{tmp_path}/right.py:reward"}]},
        algorithm={"name": "dapo", "dynamic_sampling": True, "overlong_buffer": 8, "max_sampling_rounds": 2},
    )
    done = run_ranks(2, ["-m", "megatron_tlt"], "train", str(config), "train.max_lost_steps=2", check=False)
    assert done.returncode in (1, 9)  # 9: mpiexec killed a rank that was aborting, too
    assert "train.max_lost_steps = 2" in done.stdout and "Traceback" not in done.stdout
    dropped = "16 groups with equal rewards, mean reward 1, 100.0% of responses correct: all right, prompts too easy"
    assert done.stdout.count(f"step 1: dynamic sampling kept no group in 2 rollouts: {dropped}") == 1
    found = rows(tmp_path / "run")
    assert [row["sampling/empty_in_a_row"] for row in found] == [1, 2]
    assert [row["sampling/dropped_reward"] for row in found] == [1, 1]
