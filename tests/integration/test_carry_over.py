"""Partial rollouts: nothing depends on drafts, ranks, or a kill while responses are carried over."""

import json

import pytest

from tests.helpers.columns import undocumented_of
from tests.helpers.mpi import run_one, run_ranks
from tests.helpers.runs import TLT_ON, assert_same_checkpoint, rollout_digests, rows, run_with_fault, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.ci]
TRAIN = ["-m", "megatron_tlt", "train"]
STEPS, LAST = 6, "checkpoints/step-000006"


def test_drafts_ranks_and_a_kill_change_no_carried_trajectory_and_no_weight(tmp_path):
    config = write_config(
        tmp_path,
        rollout={"samples_per_prompt": 4, "max_tokens": 40, "carry_over": 12, "stop": ["a"]},
        train={"num_steps": STEPS, "prompts_per_step": 8},
        checkpoint={"every": 2},
        eval={"every": STEPS, "num_prompts": 4},
    )
    off, on, one = tmp_path / "off", tmp_path / "on", tmp_path / "one"
    run_one("train", config, f"train.run_dir={one}")
    run_ranks(2, TRAIN, str(config), f"train.run_dir={off}")
    drafting = [f"train.run_dir={on}", "checkpoint.asynchronous=false", *TLT_ON]
    run_with_fault(config, {"cached": [0, 6, 5]}, *drafting)
    assert (on / "checkpoints/step-000004/carried.jsonl").is_file()
    run_ranks(2, TRAIN, str(config), *drafting)
    assert_same_checkpoint(off / LAST, on / LAST)
    assert rollout_digests(off) == rollout_digests(on) == rollout_digests(one)
    evaluations = [json.loads(line) for line in (off / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("eval/mean_length", 0) for row in evaluations) > 12, "of whole responses"
    resumed = rows(on)
    assert undocumented_of([*resumed, *evaluations]) == [], "columns that docs/reference/metrics.md does not have"
    assert resumed[4]["rollout_cache/reused"] > 0 and resumed[5]["rollout_cache/reused"] >= 5
    last = resumed[-1]
    assert last["engine/spec_row_steps"] > 0 and last["drafter/steps"] > 0
    assert last["carry_over/token_age_max"] >= 2 and last["carry_over/waiting_responses"] > 0
