"""The warning of rewards that never reach the default threshold."""

from __future__ import annotations

from megatron_tlt.trainer.metrics import threshold_warning


def test_rewards_below_the_default_threshold_are_a_warning() -> None:
    text = threshold_warning({"reward/accuracy": 0.0, "reward/mean": 0.926})
    assert text is not None and "though their mean is 0.926: accuracy and pass@k stay 0" in text
    assert threshold_warning({"reward/accuracy": 0.1, "reward/mean": 0.926}) is None
    assert threshold_warning({"reward/accuracy": 0.0, "reward/mean": 0.0}) is None, "no response is right"
    assert threshold_warning({"rollout/samples": 0.0}) is None
