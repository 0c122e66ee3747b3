"""Whole runs with speculation on and off: the same responses, rewards and weights, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from make_demo_policy import write_experts

from megatron_tlt.drafter.checkpoint import save_drafter
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.config import EagleConfig
from tests.helpers.mpi import run_ranks
from tests.helpers.runs import checkpoint_tensors, rows, write_config
from tests.helpers.tiny_drafters import random_drafter

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

SAME = ("reward/mean", "length/mean", "policy/loss", "policy/grad_norm", "engine/generated_tokens")


def test_weights_are_the_same_with_and_without_speculation(tmp_path: Path):
    config = write_config(tmp_path, train={"num_steps": 4, "prompts_per_step": 8}, checkpoint={"every": 4})
    model = ModelConfig.from_hf(tmp_path / "model")
    save_drafter(tmp_path / "drafter", EagleConfig.of(model), random_drafter(model))
    spec, at = "rollout.speculation", f"rollout.speculation.drafter_path={tmp_path / 'drafter'}"
    runs = {
        "off": [],
        "adaptive": [f"{spec}.drafter=suffix"],  # may find that drafts do not pay
        "suffix": [f"{spec}.drafter=suffix", f"{spec}.selector=fixed", f"{spec}.draft_len=4"],
        "eagle": [f"{spec}.drafter=eagle", f"{spec}.selector=fixed", f"{spec}.draft_len=3", at],
        "mixed": [f"{spec}.drafter=eagle", f"{spec}.with_suffix=true", f"{spec}.selector=fixed", at],
    }
    write_experts(tmp_path / "model", tmp_path / "experts", seed=0)
    experts = [f"model.path={tmp_path / 'experts'}", "actor.ep=2", "actor.router_replay=rollout"]
    runs["off of experts"] = experts
    trained = ["idle.train_drafter=true", "idle.min_steps_per_window=1"]  # also where no rank waits long enough
    runs["trained on experts"] = [*experts, *runs["mixed"], *trained]
    listing = tmp_path / "jobs.json"
    jobs = [[str(config), [f"train.run_dir={tmp_path / name}", *o]] for name, o in runs.items()]
    listing.write_text(json.dumps(jobs))
    run_ranks(2, "tests/integration/workers/train_many.py", str(listing))
    for name in runs:
        if name.startswith("off"):
            continue
        off = tmp_path / ("off of experts" if "experts" in name else "off")
        plain = checkpoint_tensors(off / "checkpoints" / "step-000004")
        assert any(value.abs().sum() > 0 for value in plain.values())
        other = checkpoint_tensors(tmp_path / name / "checkpoints" / "step-000004")
        assert other.keys() == plain.keys()
        unequal = [key for key in plain if not torch.equal(plain[key], other[key])]
        assert not unequal, f"{name}: {unequal[:5]}"
        for mine, theirs in zip(rows(tmp_path / name), rows(off), strict=True):
            assert {k: mine[k] for k in SAME} == {k: theirs[k] for k in SAME}
        drafted = sum(row["engine/spec_row_steps"] for row in rows(tmp_path / name))
        assert drafted > 0 or name == "adaptive", name
    steps = rows(tmp_path / "trained on experts")
    assert all((row["policy/replayed_share"], row["policy/replay_flips"]) == (1, 0) for row in steps)
    assert sum(row["drafter/steps"] for row in steps) > 0
