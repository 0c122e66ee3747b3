"""Whole runs with speculation on and off: the same responses, rewards and weights, bit for bit."""

from pathlib import Path

import pytest
from make_demo_policy import write_experts

from megatron_tlt.drafter.checkpoint import save_drafter
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.config import EagleConfig
from tests.helpers.runs import assert_same_training, rows, train_many, write_config
from tests.helpers.tiny_drafters import random_drafter

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def test_weights_are_the_same_with_and_without_speculation(tmp_path: Path):
    config = write_config(tmp_path, train={"num_steps": 3, "prompts_per_step": 8}, checkpoint={"every": 3})
    model = ModelConfig.from_hf(tmp_path / "model")
    save_drafter(tmp_path / "drafter", EagleConfig.of(model), random_drafter(model))
    spec, at = "rollout.speculation", f"rollout.speculation.drafter_path={tmp_path / 'drafter'}"
    runs = {
        "off": [],
        "suffix": [f"{spec}.drafter=suffix", f"{spec}.selector=fixed", f"{spec}.draft_len=4"],
        "eagle": [f"{spec}.drafter=eagle", f"{spec}.selector=fixed", f"{spec}.draft_len=3", at],
    }
    write_experts(tmp_path / "model", tmp_path / "experts", seed=0)
    experts = [f"model.path={tmp_path / 'experts'}", "actor.ep=2", "actor.router_replay=rollout"]
    runs["off of experts"] = experts
    trained = ["idle.train_drafter=true", "idle.min_steps_per_window=1"]  # also where no rank waits long enough
    runs["trained on experts"] = [*experts, *runs["eagle"], *trained]
    train_many(config, runs)
    for name in runs:
        assert_same_training(tmp_path / ("off of experts" if "experts" in name else "off"), tmp_path / name, 3)
        drafted = sum(row["engine/spec_row_steps"] for row in rows(tmp_path / name))
        assert drafted > 0 or name.startswith("off"), name
    steps = rows(tmp_path / "trained on experts")
    assert all((row["policy/replayed_share"], row["policy/replay_flips"]) == (1, 0) for row in steps)
    assert sum(row["drafter/steps"] for row in steps) > 0
