"""Runs with an environment: nothing depends on drafts, on when tools answer, on a kill."""

import json

import pytest

from tests.helpers.columns import undocumented_of
from tests.helpers.events import read_events
from tests.helpers.mpi import run_one, run_ranks
from tests.helpers.runs import TLT_ON, assert_same_checkpoint, rollout_digests, rows, run_with_fault, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.ci]
TRAIN = ["-m", "megatron_tlt", "train"]
STEPS, LAST = 2, "checkpoints/step-000002"


def test_late_tools_drafts_ranks_and_a_kill_change_no_trajectory_and_no_weight(tmp_path):
    """`retry`, `calculator` and `python`. One rank adds gradients in another order: its weights differ by rounding."""
    limits = {"max_turns": 3, "max_turn_tokens": 8, "max_observation_tokens": 16}
    config = write_config(
        tmp_path,
        env={"path": "tests.helpers.late_environments:LateEnvironments", **limits},
        rollout={"samples_per_prompt": 4, "max_tokens": 60},
        rewards={"functions": [{"name": "python", "path": "tests.helpers.rewards:vowels"}, {"name": "env"}]},
        train={"num_steps": STEPS, "prompts_per_step": 8},
        eval={"every": 0},
    )
    off, on, one = (tmp_path / name for name in ("off", "on", "one"))
    early = "env.params.most_s=0"
    run_ranks(2, TRAIN, str(config), early, f"train.run_dir={off}")
    run_one("train", config, early, f"train.run_dir={one}")
    late = ["env.params.most_s=0.1", f"train.run_dir={on}", "checkpoint.asynchronous=false", *TLT_ON]
    run_with_fault(config, {"cached": [0, 2, 5]}, *late)
    run_ranks(2, TRAIN, str(config), *late)
    assert_same_checkpoint(off / LAST, on / LAST)
    assert rollout_digests(off) == rollout_digests(on) == rollout_digests(one)
    last = rows(on)[-1]
    assert undocumented_of(rows(on)) == [], "columns that docs/reference/metrics.md does not have"
    assert last["rollout_cache/reused"] >= 5 and last["env/turns"] > 1 and last["env/failures"] == 0
    assert last["engine/spec_row_steps"] > 0 and last["env/recovered_seconds"] > 0
    assert 0 < last["env/parked_share"] <= 1 and any(e["name"] == "WAITING" for e in read_events(on, 0))
    for run_dir in (off, on):  # samples have all turns, with drafts and without
        samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
        assert any(len(sample["turns"]) > 1 for sample in samples)
        for first, *_ in (sample["turns"] for sample in samples if sample["given"]):
            assert first["observation"] and first["seconds"] > 0 and first["response"]
