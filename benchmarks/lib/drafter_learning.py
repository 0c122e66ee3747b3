"""Training of a drafter for so many seconds of CPU time, for the benchmarks of what it learns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from megatron_tlt.drafter.online_trainer import OnlineDrafterTrainer
from megatron_tlt.models.drafters import DrafterModel


def train_to_marks(trainer: OnlineDrafterTrainer, marks: Sequence[float]) -> Iterator[float]:
    """Yields each mark when the trainer's micro-steps have taken so many CPU seconds in all. Mutates the trainer."""
    spent = 0.0
    for mark in marks:
        while spent < mark:
            began = time.process_time()
            trainer.train_step()
            spent += time.process_time() - began
        yield mark


def with_mean_weights(fresh: DrafterModel, trainer: OnlineDrafterTrainer, model: DrafterModel) -> DrafterModel:
    """`fresh` with the mean of the weights of `model` over its training, as drafters are published. Mutates it."""
    fresh.load_full({**trainer._state.mean(), **dict(model.named_buffers())}.items())
    return fresh
