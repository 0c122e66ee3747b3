from __future__ import annotations

import pytest
import torch

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.eagle.model import EagleModel
from megatron_tlt.drafters.model import DrafterConfig
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.drafters.training.batching import collate
from megatron_tlt.drafters.training.trainer import DrafterTrainer
from tests.helpers.pairs import block_config
from tests.helpers.tiny_drafters import DEEP, FAMILIES, lookup_tables, random_sequence

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


def test_the_rate_warms_up_and_falls_to_0_by_num_steps() -> None:
    t = trainer()  # of 40 steps
    for step, rate in {0: 1.5e-4, 19: 3e-3, 20: 3e-3, 25: 2.5606602e-3, 30: 1.5e-3, 40: 0.0}.items():
        t.state.steps = step
        assert t.step(BATCH, TABLES)["lr"] == pytest.approx(rate), step


@pytest.mark.parametrize(
    ("config", "factor"),
    [(EagleConfig.of(CONFIG), 0.1), (block_config(DEEP["qwen3"]), 0.1 / 6)],  # whose blocks give 6 tokens
    ids=["eagle", "dspark"],
)
def test_gradients_are_clipped_to_norm_1_a_drafted_position(config: DrafterConfig, factor: float, monkeypatch) -> None:
    t, taken = DrafterTrainer(KINDS[config.kind].build_model(config), DrafterSection()), []
    monkeypatch.setattr(t.state, "step", lambda lr, factor: taken.append(float(factor)))
    for norm in (10.0, 0.01):
        monkeypatch.setattr(t.state, "take_gradients", lambda norm=norm: torch.tensor(norm))
        assert t.apply()["grad_norm"] == pytest.approx(norm)
    assert taken == pytest.approx([factor, 1.0])
