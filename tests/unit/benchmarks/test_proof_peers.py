"""What proof_trl.py and proof_vllm.py give a peer: this project's prompts and rewards; and their sums."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.lib import proof_trl, proof_vllm
from benchmarks.lib.prompt_rows import RowReward, read_rows, write_rows
from megatron_tlt.config.load import load_config
from megatron_tlt.data.prompts import build_prompts
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.rewards.pool import RewardPool
from megatron_tlt.types import Sample, SampleGroup
from tests.helpers.mpi import ROOT

QUICKSTART = ROOT / "configs/quickstart.yaml"


@pytest.fixture(scope="module")
def config():
    return load_config(
        QUICKSTART,
        [f"model.path={ROOT / 'assets/demo-policy'}", "rewards.workers=0", "data.system_prompt=Be brief."],
    )


@pytest.fixture(scope="module")
def prompts(config):
    tokenizer = HFTokenizer(config.model.path)
    return build_prompts(config.data, "train", tokenizer, config.train.seed).next_batch(24)


def test_rows_are_the_runs_prompts(config, prompts, tmp_path: Path):
    from transformers import AutoTokenizer

    write_rows(prompts, config.data, tmp_path / "rows.jsonl")
    rows = read_rows(tmp_path / "rows.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    ids = [tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True)["input_ids"] for r in rows]
    assert ids == [list(p.token_ids) for p in prompts]
    assert [r["token_ids"] for r in rows] == ids


def test_a_row_is_rewarded_as_the_run_rewards_it(config, prompts, tmp_path: Path):
    """Right, nearly right, wrong and missing answers: the pool that a run scores with is the other side."""
    write_rows(prompts, config.data, tmp_path / "rows.jsonl")
    texts = [
        lambda p: f"so <answer>{p.answer}</answer>",
        lambda p: f"<answer>{p.answer} or so</answer>",
        lambda p: "<answer>nothing</answer>",
        lambda p: str(p.answer),
    ]
    groups = [
        SampleGroup(p, [Sample(p.prompt_id, i, [], [], text(p), "stop", 0) for i, text in enumerate(texts)])
        for p in prompts
    ]
    pool = RewardPool(config.rewards)
    pool.score(groups)
    pool.close()
    reward = RowReward(config.rewards)
    values = [
        [reward(row["question"], sample.text) for sample in group.samples]
        for row, group in zip(read_rows(tmp_path / "rows.jsonl"), groups, strict=True)
    ]
    assert values == [[r.value for r in group.rewards] for group in groups]
    assert {v for of_prompt in values for v in of_prompt} >= {0.0, 1.0}


def test_settings_that_trl_has_not_are_refused(config):
    proof_trl.check_same(config)
    other = load_config(QUICKSTART, ["algorithm.kl_coef=0.1", "rollout.top_p=0.9"])
    with pytest.raises(SystemExit, match=r"kl_coef is 0.1.*top_p.*0\.9"):
        proof_trl.check_same(other)


def test_trl_summary_pairs_steps_and_counts_standard_errors():
    seconds = {("ours", 0): [2.0, 4.0], ("trl", 0): [20.0, 20.0], ("ours", 1): [1.0], ("trl", 1): [9.0, 50.0]}
    rows = [
        {"part": "speed", "side": side, "turn": turn, "step": step, "seconds": s}
        for (side, turn), of_turn in seconds.items()
        for step, s in enumerate(of_turn, 1)
    ]
    figures = {"trl": (0.6, 0.03), "ours": (0.7, 0.04)}
    rows += [
        {"part": "eval", "side": side, "steps": 30, "accuracy": accuracy, "stderr": stderr}
        for side, (accuracy, stderr) in figures.items()
    ]
    summary = proof_trl.summarize(rows)
    assert summary["vs_trl"] == 9.0  # of 10, 5 and 9; the step that only one side did does not count
    assert math.isclose(summary["accuracy_gap_se"], 2.0)
    assert summary["learn_steps"] == 30


def test_vllm_summary_takes_its_fastest_repaired_side():
    rates = {"ours plain": 50, "ours TLT": 120, "vllm plain": 30, "vllm ngram": 40, "vllm eagle": 60}
    rates |= {"vllm ngram as-shipped": 1000, "ours plain in vllm": 24, "ours TLT in vllm": 90}
    rows = [{"requests": 4, "side": side, "tokens_per_s": rate} for side, rate in rates.items()]
    assert json.loads(json.dumps(proof_vllm.summarize(rows))) == {
        "tokens_per_s_4": 120,
        "vs_vllm_4": 2.0,
        "vs_vllm_plain_4": 4.0,
        "tlt_gain_4": 2.4,
        "vllm_gain_4": 2.0,
        "tlt_in_vllm_gain_4": 3.75,
        "in_vllm_vs_vllm_4": 1.5,
        "keyed_vs_plain_4": 0.8,
    }
