"""The learning-rate schedule."""

from __future__ import annotations

import pytest

from megatron_tlt.actor.lr_schedule import learning_rate
from megatron_tlt.config.actor import OptimizerSection


def rates(steps: int, **fields: object) -> list[float]:
    section = OptimizerSection.model_validate({"lr": 1.0, **fields})
    return [learning_rate(section, step, steps) for step in range(steps)]


def test_warmup_reaches_the_peak_with_its_last_step_and_is_never_zero() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_goes_from_peak_to_minimum() -> None:
    section = OptimizerSection(lr=1.0, min_lr=0.2, schedule="linear", warmup_steps=2)
    assert learning_rate(section, 2, 10) == 1.0
    assert learning_rate(section, 6, 10) == pytest.approx(0.6)
    assert learning_rate(section, 10, 10) == pytest.approx(0.2)
    assert learning_rate(section, 1000, 10) == pytest.approx(0.2)


def test_cosine_is_halfway_in_the_middle_and_ends_at_decay_steps() -> None:
    section = OptimizerSection(lr=1.0, schedule="cosine", decay_steps=8)
    assert learning_rate(section, 0, 100) == 1.0
    assert learning_rate(section, 4, 100) == pytest.approx(0.5)
    assert learning_rate(section, 8, 100) == pytest.approx(0.0)
