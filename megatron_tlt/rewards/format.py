"""Whether the whole answer matches a pattern."""

from __future__ import annotations

from megatron_tlt.config.data import RewardConfig
from megatron_tlt.rewards.base import compile_pattern
from megatron_tlt.types import Prompt, Sample


class FormatReward:
    """1 if the whole text matches the pattern, else 0."""

    def __init__(self, config: RewardConfig):
        pattern = compile_pattern(config.pattern)
        assert pattern is not None, "config/checks requires it"
        self._pattern = pattern

    def __call__(self, prompt: Prompt, sample: Sample) -> float:
        """Looks at the text only."""
        return float(self._pattern.fullmatch(sample.text) is not None)
