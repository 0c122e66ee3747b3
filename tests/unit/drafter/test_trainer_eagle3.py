from __future__ import annotations

import pytest
import torch

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.drafter.batching import collate
from megatron_tlt.drafter.loss import draft_loss
from megatron_tlt.drafter.measure import measure
from megatron_tlt.drafter.trainer import DrafterTrainer
from megatron_tlt.models.eagle.config import DrafterConfig
from megatron_tlt.models.eagle.eagle3 import Eagle3Model
from megatron_tlt.models.eagle.pairs import PairLayout
from tests.helpers.tiny_drafters import lookup_tables, random_drafter
from tests.helpers.tiny_eagle3 import POLICIES, random_sequence3

CONFIG = DrafterConfig.eagle3(POLICIES["qwen3"], draft_vocab_size=70)
SEQUENCES = [random_sequence3(CONFIG, n, 3, seed=n) for n in (12, 20, 26)]
BATCH = collate(SEQUENCES)


def trainer(**fields) -> DrafterTrainer:
    section = DrafterSection(**({"draft_steps": 3, "lr": 3e-3, "warmup_steps": 5, "num_steps": 40} | fields))
    embed, head = lookup_tables(CONFIG.policy)
    model = Eagle3Model(CONFIG)
    model.initialise(0)
    model.set_vocabulary(torch.arange(10, 80))
    model.take_head(head)
    return DrafterTrainer(model, embed, head, section)


def test_steps_learn_and_the_vocabulary_stays() -> None:
    t = trainer()
    before, vocabulary = [t.embed.clone(), t.head.clone()], t.model.token_ids().clone()
    seen = [t.step(BATCH) for _ in range(40)]
    assert seen[-1]["loss"] < 0.6 * seen[0]["loss"]
    for position in (1, 2, 3):
        assert seen[-1][f"accept/{position}"] > seen[0][f"accept/{position}"] + 0.1
    assert torch.equal(t.embed, before[0]) and torch.equal(t.head, before[1])
    assert torch.equal(t.model.token_ids(), vocabulary)
    assert t.trained_steps == 40


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_measured_overlap_is_the_losses(temperature: float) -> None:
    """Two ways to 1 - TV over the whole vocabulary: scattered logits, and sums over the drafter's tokens."""
    embed, head = lookup_tables(CONFIG.policy)
    model = Eagle3Model(CONFIG)
    model.load_full(random_drafter(CONFIG).items())
    got = measure(
        model, embed, head, SEQUENCES, steps=3, temperature=temperature, batch_tokens=64, window=512
    )
    layout = PairLayout(BATCH)
    with torch.no_grad():
        outputs = model.unroll(embed, BATCH, layout, 3)
        _, parts = draft_loss(model, outputs, BATCH, layout, head, DrafterSection().loss, temperature)
    assert got.overlap == pytest.approx([float(x) for x in parts["accept"]], abs=1e-5)
