from __future__ import annotations

import math

import pytest
import torch

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.drafter import trainer as module
from megatron_tlt.drafter.batching import collate
from megatron_tlt.drafter.trainer import DrafterTrainer, learning_rate
from megatron_tlt.models.eagle.model import EagleModel
from tests.helpers.tiny_drafters import FAMILIES, lookup_tables, random_sequence

CONFIG = FAMILIES["qwen3"]
BATCH = collate([random_sequence(CONFIG, n, 3) for n in (12, 20, 26)])


def trainer(hidden_state_noise: float = 0.0, **fields) -> DrafterTrainer:
    section = DrafterSection(**({"draft_steps": 3, "lr": 3e-3, "warmup_steps": 5, "num_steps": 40} | fields))
    model = EagleModel(CONFIG)
    model.initialise(0)
    return DrafterTrainer(model, *lookup_tables(CONFIG), section, hidden_state_noise=hidden_state_noise)


def test_steps_learn() -> None:
    t = trainer()
    seen = [t.step(BATCH) for _ in range(40)]
    assert seen[-1]["loss"] < 0.5 * seen[0]["loss"]
    for position in (1, 2, 3):
        assert seen[-1][f"accept/{position}"] > seen[0][f"accept/{position}"] + 0.1
        assert seen[-1][f"hidden/{position}"] < seen[0][f"hidden/{position}"]
    assert t.trained_steps == 40


def test_noise_is_on_what_is_read_not_on_what_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its share of the states' size, another one each step, the same again after a restart; targets stay exact."""
    t, read = trainer(hidden_state_noise=0.25), []
    unroll, loss = t.model.unroll, module.draft_loss
    t.model.unroll = lambda embed, batch, *rest: read.append(batch.hidden) or unroll(embed, batch, *rest)
    targets: list[torch.Tensor] = []

    def noted(model, outputs, batch, *rest):
        targets.append(batch.hidden)
        return loss(model, outputs, batch, *rest)

    monkeypatch.setattr(module, "draft_loss", noted)
    for _ in range(2):
        t.step(BATCH)
    assert len(targets) == 2 and all(target is BATCH.hidden for target in targets)
    noise = [hidden - BATCH.hidden for hidden in read]
    size = BATCH.hidden.pow(2).mean().sqrt()
    for one in noise:
        assert float(one.std() / size) == pytest.approx(0.25, rel=0.1)
    assert not torch.equal(*noise)
    t.trained_steps = 0
    t.step(BATCH)
    assert torch.equal(read[2], read[0])


def test_bf16_arithmetic_keeps_fp32_weights() -> None:
    t = trainer(dtype="bf16")
    exact = trainer().step(BATCH)
    rounded = t.step(BATCH)
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=0.02)
    assert rounded["loss"] != exact["loss"]
    assert all(p.dtype == torch.float32 for p in t.model.parameters())


def test_learning_rates() -> None:
    section = DrafterSection(lr=1.0, min_lr=0.1, warmup_steps=4, num_steps=104)
    assert [learning_rate(section, s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(section, 54) == pytest.approx(0.55)
    assert learning_rate(section, 29) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert learning_rate(section, 500) == pytest.approx(0.1)
    assert learning_rate(section.model_copy(update={"schedule": "constant"}), 500) == 1.0
