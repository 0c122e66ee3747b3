from __future__ import annotations

import math

import pytest
import torch

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.eagle.model import EagleModel
from megatron_tlt.drafters.training.batching import collate
from megatron_tlt.drafters.training.trainer import DrafterTrainer, LearningRate
from tests.helpers.tiny_drafters import FAMILIES, lookup_tables, random_sequence

CONFIG = FAMILIES["qwen3"]
BATCH = collate([random_sequence(CONFIG, n, 3) for n in (12, 20, 26)])
TABLES = lookup_tables(CONFIG)


def trainer(**fields) -> DrafterTrainer:
    section = DrafterSection(**({"draft_steps": 3, "lr": 3e-3, "num_steps": 40} | fields))
    model = EagleModel(EagleConfig.of(CONFIG))
    model.initialise(0)
    return DrafterTrainer(model, section)


def test_bf16_arithmetic_keeps_fp32_weights() -> None:
    t = trainer(dtype="bf16")
    exact = trainer().step(BATCH, TABLES)
    rounded = t.step(BATCH, TABLES)
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=0.02)
    assert rounded["loss"] != exact["loss"]
    assert all(p.dtype == torch.float32 for p in t.model.parameters())


def test_a_wide_drafter_learns_at_a_lower_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trainer().rate.peak == 3e-3
    monkeypatch.setattr("megatron_tlt.drafters.training.trainer._WIDTH", CONFIG.hidden_size / 4)
    assert trainer().rate.peak == pytest.approx(3e-3 / 4)


def test_learning_rates() -> None:
    rate = LearningRate(1.0, 4, 104)
    assert [rate.at(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate.at(54) == pytest.approx(0.5)
    assert rate.at(29) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert rate.at(500) == pytest.approx(0.0)
    assert LearningRate(1.0, 4).at(500) == 1.0
