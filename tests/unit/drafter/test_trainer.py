from __future__ import annotations

import math

import pytest
import torch

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.drafter.batching import collate
from megatron_tlt.drafter.trainer import DrafterTrainer, drafter_learning_rate
from megatron_tlt.models.eagle.config import EagleConfig
from megatron_tlt.models.eagle.model import EagleModel
from tests.helpers.tiny_drafters import FAMILIES, lookup_tables, random_sequence

CONFIG = FAMILIES["qwen3"]
BATCH = collate([random_sequence(CONFIG, n, 3) for n in (12, 20, 26)])


def trainer(**fields) -> DrafterTrainer:
    section = DrafterSection(**({"draft_steps": 3, "lr": 3e-3, "warmup_steps": 5, "num_steps": 40} | fields))
    model = EagleModel(EagleConfig.of(CONFIG))
    model.initialise(0)
    return DrafterTrainer(model, *lookup_tables(CONFIG), section)


def test_bf16_arithmetic_keeps_fp32_weights() -> None:
    t = trainer(dtype="bf16")
    exact = trainer().step(BATCH)
    rounded = t.step(BATCH)
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=0.02)
    assert rounded["loss"] != exact["loss"]
    assert all(p.dtype == torch.float32 for p in t.model.parameters())


def test_learning_rates() -> None:
    section = DrafterSection(lr=1.0, min_lr=0.1, warmup_steps=4, num_steps=104)
    assert [drafter_learning_rate(section, s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert drafter_learning_rate(section, 54) == pytest.approx(0.55)
    assert drafter_learning_rate(section, 29) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert drafter_learning_rate(section, 500) == pytest.approx(0.1)
    assert drafter_learning_rate(section.model_copy(update={"schedule": "constant"}), 500) == 1.0
