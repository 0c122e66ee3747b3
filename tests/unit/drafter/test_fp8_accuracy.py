"""A drafter kept up in FP8 is accepted as often as one kept up in fp32, on the demo policy's hidden states."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.drafter.batching import DraftSequence
from megatron_tlt.drafter.checkpoint import load_drafter
from megatron_tlt.drafter.measure import measure
from megatron_tlt.drafter.online_trainer import OnlineDrafterTrainer
from megatron_tlt.models.eagle.model import EagleModel
from megatron_tlt.types import HiddenStateSample
from tests.helpers.demo import demo_chunks, demo_config, demo_tables
from tests.helpers.mpi import ROOT

STEPS = 100
pytestmark = pytest.mark.slow


def damaged_drafter() -> EagleModel:
    """The demo drafter with noise half as large as its weights: a policy that has moved on leaves about as little."""
    model = EagleModel(demo_config())
    model.load_full(load_drafter(ROOT / "assets" / "demo-drafter", demo_config()).weights.items())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.add_(torch.randn(p.shape, generator=generator) * p.std() * 0.5)
    return model


def overlap(weights, held_out: list[HiddenStateSample]) -> list[float]:
    """1 - TV by position, in fp32: FP8 is for training only."""
    plain = EagleModel(demo_config())
    plain.load_full(weights.items())
    sequences = [
        DraftSequence(torch.from_numpy(c.token_ids).long(), c.hidden, c.prompt_len) for c in held_out
    ]
    options = {"steps": 4, "temperature": 1.0, "batch_tokens": 2048, "window": 512}
    return measure(plain, *demo_tables(), sequences, **options).overlap


def test_acceptance_is_within_one_percent() -> None:
    data, held_out = demo_chunks(120, 900), demo_chunks(40, 901)
    start = overlap(damaged_drafter().state_dict(), held_out)
    reached = {}
    for mode in ("off", "emulate"):
        section = DrafterSection(online={"fp8": mode, "lr": 2e-3, "micro_step_tokens": 192})
        trainer = OnlineDrafterTrainer(damaged_drafter(), section)
        trainer.begin_step(0, demo_tables)
        for chunk in data:
            trainer.buffer.add(chunk)
        for _ in range(STEPS):
            trainer.train_step()
        reached[mode] = overlap(trainer.weights(), held_out)
    print(start, reached)
    for position, (before, exact, rounded) in enumerate(
        zip(start, reached["off"], reached["emulate"], strict=True), 1
    ):
        assert exact > before + 0.2, position
        assert rounded > 0.99 * exact, position
