"""Answers of earlier policy versions are learned through the present embedding and LM head: what that costs."""

from __future__ import annotations

import torch

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.drafter.batching import DraftSequence, collate
from megatron_tlt.drafter.measure import measure
from megatron_tlt.drafter.trainer import DrafterTrainer
from megatron_tlt.models.eagle.model import EagleModel
from tests.helpers.hidden_states import imitable_chunk, imitable_policy
from tests.helpers.tiny_drafters import FAMILIES

CONFIG = FAMILIES["llama"]
VERSIONS = 3  # the present one and as many before it as `drafter.online.max_age` keeps
DRIFT = 0.01  # of a tensor's norm from one version to the next, some hundred times that of RL with Adam at 1e-6
Tables = tuple[torch.Tensor, torch.Tensor]


def versions() -> tuple[list[Tables], list[list[DraftSequence]]]:
    """A policy that moves: its tables, and its answers, by version."""
    teacher = EagleModel(CONFIG)
    tables, answers = [imitable_policy(CONFIG, teacher)], []
    generator = torch.Generator().manual_seed(1)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + DRIFT * tensor.std() * torch.randn(tensor.shape, generator=generator)

    for version in range(VERSIONS):
        if version:
            tables.append((moved(tables[-1][0]), moved(tables[-1][1])))
            with torch.no_grad():
                teacher.fc.weight.copy_(moved(teacher.fc.weight))
        chunks = [imitable_chunk(teacher, *tables[-1], 40, 3, key=100 * version + i) for i in range(14)]
        answers.append([DraftSequence.of(chunk, chunk.hidden) for chunk in chunks])
    return tables, answers


def overlap(tables: list[Tables], answers: list[list[DraftSequence]], reads_present: bool) -> float:
    """1 - TV with the present policy on answers of its own that were not trained on."""
    model = EagleModel(CONFIG)
    model.initialise(0)
    section = DrafterSection(draft_steps=1, lr=3e-3, warmup_steps=5, schedule="constant")
    trainer = DrafterTrainer(model, *tables[-1], section)
    for step in range(120):
        version = step % VERSIONS
        trainer.set_policy(*tables[-1 if reads_present else version])
        trainer.step(collate(answers[version][:10]))
    options = {"steps": 1, "temperature": 1.0, "batch_tokens": 512, "window": 512}
    return measure(model, *tables[-1], answers[-1][10:], **options).overlap[0]


def test_acceptance_does_not_suffer() -> None:
    tables, answers = versions()
    present, own = (overlap(tables, answers, reads_present) for reads_present in (True, False))
    assert own > 0.5  # something was learned
    assert present > own - 0.01
