"""The environment's own rewards of a trajectory's turns."""

from __future__ import annotations

from megatron_tlt.config.data import RewardConfig
from megatron_tlt.rewards.base import Scorer
from megatron_tlt.types import Prompt, Sample


def env_reward(config: RewardConfig) -> Scorer:
    """The sum of the turns' rewards, or the last one; 0 for a response that ended before its environment answered."""

    def score(prompt: Prompt, sample: Sample) -> float:
        rewards = sample.turn_rewards
        return sum(rewards) if config.turns == "sum" else (rewards or [0.0])[-1]

    return score
