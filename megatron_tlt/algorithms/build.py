"""From the configuration to an algorithm."""

from __future__ import annotations

from megatron_tlt.algorithms.base import Algorithm
from megatron_tlt.algorithms.dapo import Dapo
from megatron_tlt.algorithms.distill import Distill
from megatron_tlt.algorithms.dr_grpo import DrGrpo
from megatron_tlt.algorithms.grpo import Grpo
from megatron_tlt.algorithms.gspo import Gspo
from megatron_tlt.algorithms.reinforce_pp import ReinforcePp
from megatron_tlt.algorithms.rloo import Rloo
from megatron_tlt.config.algorithm import AlgorithmName, AlgorithmSection

ALGORITHMS: dict[AlgorithmName, type[Algorithm]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "rloo": Rloo,
    "reinforce_pp": ReinforcePp,
    "gspo": Gspo,
    "distill": Distill,
}


def build_algorithm(config: AlgorithmSection, max_tokens: int, has_engine_logprobs: bool = True) -> Algorithm:
    """The configured algorithm. `max_tokens` is `rollout.max_tokens`; `has_engine_logprobs`: see `Algorithm`."""
    return ALGORITHMS[config.name](config, max_tokens, has_engine_logprobs)
