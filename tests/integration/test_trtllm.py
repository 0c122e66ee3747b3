"""A whole run on real ranks whose responses come from TensorRT-LLM's server process, with the toy engine in it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.helpers.runs import make_model, rows, train_many, write_config
from tests.helpers.trtllm_engines import fake_python

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def test_a_run_trains_on_an_engine_in_another_process(tmp_path: Path) -> None:
    """With TLT on: an EAGLE-3 drafter, trained while ranks wait on the actor's hidden states, is swapped in whole."""
    config = write_config(
        tmp_path,
        rollout={
            "backend": "trtllm",
            "trtllm": {"python": fake_python(tmp_path)},
            "speculation": {"drafter": "eagle3"},
        },
        idle={"train_drafter": True, "min_steps_per_window": 2},
        drafter={"online": {"merge_share": 1e6}},
        # With an entropy bonus responses of equal rewards are trained on, too.
        algorithm={"importance_cap": 0, "entropy_coef": 0.001},
        train={"num_steps": 3},
        sync={"verify": True},  # the engine holds the bytes that were pushed, the drafter's, too
        checkpoint={"every": 0},
        rewards={"functions": [{"name": "python", "path": "tests.helpers.rewards:vowels", "threshold": 0.0}]},
    )
    make_model(tmp_path / "model", num_layers=4)  # EAGLE-3 reads three layers below the last
    train_many(config, {"run": []})
    mine = rows(tmp_path / "run")
    assert [row["step"] for row in mine] == [1, 2, 3]
    for row in mine:
        assert row["engine/finished_requests"] == 32
        assert row["engine/generated_tokens"] > 32
        assert row["spec/accept_length"] == 2.0, "the toy's drafter, from its own figures"
        assert math.isfinite(row["policy/loss"])
        assert "policy/mismatch_abs" not in row, "the actor would be compared with itself"
        assert row["sync/mib"] > 0
    # Windows train on the step before: none is there in the first one.
    assert [row["drafter/version"] for row in mine] == [0, 1, 2]
    for row in mine:  # all but responses of one token
        assert 28 * row["step"] <= row["drafter/buffer/added"] <= 32 * row["step"]
