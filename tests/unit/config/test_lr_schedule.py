"""The learning-rate schedule."""

from __future__ import annotations

import pytest

from megatron_tlt.config.actor import OptimizerSection

LINEAR = {"schedule": "linear", "min_lr": 0.2, "warmup_steps": 2}  # of 10 steps
COSINE = {"schedule": "cosine"}


@pytest.mark.parametrize(
    ("fields", "rates"),
    [
        ({"warmup_steps": 4}, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 9: 1.0}),  # never zero
        (LINEAR, {2: 1.0, 6: 0.6, 10: 0.2, 1000: 0.2}),
        (COSINE, {0: 1.0, 5: 0.5, 10: 0.0}),
        ({**COSINE, "warmup_steps": 10}, {9: 1.0, 10: 1.0, 11: 0.0}),  # no step is left for the cosine
    ],
)
def test_rates_by_step(fields: dict[str, object], rates: dict[int, float]) -> None:
    rate = OptimizerSection.model_validate({"lr": 1.0, **fields}).rate
    found = {step: rate.at(step, 10) for step in rates}
    assert found == pytest.approx(rates)
