"""Sequences of any lengths in one packed batch learn what each would learn alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.drafters.eagle.config import Eagle3Config, EagleConfig
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.drafters.training.batching import DraftSequence, bases_by_step, collate
from megatron_tlt.drafters.training.trainer import DrafterTrainer
from tests.helpers.tiny_drafters import DEEP, FAMILIES, lookup_tables, random_drafter, random_sequence

STEPS = 4
SHAPES = ((9, 4), (4, 1), (61, 2), (6, 4), (3, 2), (30, 17), (17, 17), (18, 17))  # (L, prompt); some teach nothing
DRAFTERS = {name: EagleConfig.of(policy) for name, policy in FAMILIES.items()}
DRAFTERS["eagle3"] = Eagle3Config.of(DEEP["qwen3"], draft_vocab_size=40)


def sequences(name: str) -> list[DraftSequence]:
    made = [random_sequence(DRAFTERS[name], n, p, seed=p) for n, p in SHAPES]
    return [replace(s, offset=7 * i) for i, s in enumerate(made)]


def trainer(name: str) -> DrafterTrainer:
    model = KINDS[DRAFTERS[name].kind].build_model(DRAFTERS[name])
    model.load_full(random_drafter(DRAFTERS[name], 3).items())
    section = DrafterSection(draft_steps=STEPS)
    return DrafterTrainer(model, *lookup_tables(DRAFTERS[name].policy), section)


def gradient(t: DrafterTrainer) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in t.model.parameters()])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_packed_equals_one_at_a_time(drafter: str) -> None:
    data, t = sequences(drafter), trainer(drafter)
    counts = bases_by_step(data, STEPS)
    assert counts == [sum(max(0, n - 1 - max(1, p - 1) - j) for n, p in SHAPES) for j in range(STEPS)]
    packed = t.backward(collate(data))
    wanted = gradient(t)
    total, summed = dict.fromkeys(packed, 0.0), torch.zeros_like(wanted)
    for s in data:
        if s.num_bases:
            for name, value in t.backward(collate([s]), counts).items():
                total[name] += value
            summed += gradient(t)
    total["tokens"] = packed["tokens"]
    assert total == pytest.approx(packed, rel=1e-5, abs=1e-5)
    torch.testing.assert_close(summed, wanted, atol=1e-5, rtol=1e-5)
