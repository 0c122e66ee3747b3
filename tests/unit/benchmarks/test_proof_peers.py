"""What proof_trl.py and proof_vllm.py give a peer: this project's prompts and rewards."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lib import proof_trl
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
    """Right, nearly right, wrong and missing responses: the pool that a run scores with is the other side."""
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
        [reward(row["fields"], sample.text) for sample in group.samples]
        for row, group in zip(read_rows(tmp_path / "rows.jsonl"), groups, strict=True)
    ]
    assert values == [[r.value for r in group.rewards] for group in groups]
    assert {v for of_prompt in values for v in of_prompt} >= {0.0, 1.0}


def test_settings_that_trl_has_not_are_refused(config):
    proof_trl.check_same(config)
    other = load_config(QUICKSTART, ["algorithm.kl_coef=0.1", "rollout.top_p=0.9"])
    with pytest.raises(SystemExit, match=r"kl_coef is 0.1.*top_p.*0\.9"):
        proof_trl.check_same(other)
