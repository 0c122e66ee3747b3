"""The simulation of a run's own configuration: its machines, its engine, usual lengths. Torch-free.

The memory plan decides what is simulated: a configuration that does not fit is refused, and the KV cache has the size
that a run would allocate.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megatron_tlt.config.checks.run import find_problems
from megatron_tlt.config.planning.memory import KV, estimate_memory
from megatron_tlt.config.planning.parameters import MIB, kv_bytes_per_token
from megatron_tlt.config.root import Config
from megatron_tlt.config.sim import SimConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.sim.cost_model import kv_bytes
from megatron_tlt.types import CAPABILITIES

# Assumed: the median response takes this share of `rollout.max_tokens`, with the default spread of lengths.
_MEDIAN_SHARE = 1 / 8
_GPUS = ((40.0, "rtx4090"), (80.0, "h100"), (math.inf, "h200"))  # assumed, by the most GiB of memory
STALE_RATE = 0.5  # assumed: of a drafter that starts from the policy's second layer


def simulation_of(config: Config) -> SimConfig:
    """The simulation of a run on the machines of its `cluster` section. Raises ConfigError if it cannot run or fit."""
    ranks, shape = config.cluster.num_ranks, config.model.architecture
    if shape is None:
        raise ConfigError.of("model.architecture", None, "is required to simulate a run: the shape of the model")
    memory = config.cluster.memory_gib
    if memory is None:
        raise ConfigError.of("cluster.memory_gib", None, "is required to simulate a run: it decides which GPU that is")
    if problems := find_problems(config, None, ranks, "cuda"):
        raise ConfigError(problems)
    cache = estimate_memory(config, shape, ranks, "cuda")[0].parts[KV]
    tokens = cache // kv_bytes_per_token(config, shape)
    # The simulator counts the policy's layers only; so many MiB of those hold as many tokens.
    cache_mib = max(1, tokens * kv_bytes(shape) // config.rollout.tp // MIB)
    speculation = config.rollout.speculation
    if speculation.trained and speculation.drafter_path is None:
        made = {
            "drafter_path": "made from the policy",
            "draft_vocab_size": speculation.draft_tokens(shape.vocab_size),
        }
        speculation = speculation.model_copy(update=made)
    rollout = {"kv_cache_mib": cache_mib, "speculation": speculation}
    gpu = next(gpu for most, gpu in _GPUS if memory <= most)
    tree: dict[str, Any] = {
        "name": Path(config.train.run_dir).name,
        "model": shape,
        "cluster": {
            "nodes": config.cluster.nodes,
            "gpus_per_node": config.cluster.ranks_per_node,
            "gpu": gpu,
        },
        "workload": {
            "steps": 2,
            "prompts_per_step": config.train.prompts_per_step,
            "lengths": {"median": max(1.0, config.rollout.max_tokens * _MEDIAN_SHARE)},
        },
        "rollout": config.rollout.model_copy(update=rollout),
        "idle": config.idle,
        "drafters": {"trained": {"rates": (0.82,), "stale_rates": (STALE_RATE,)}},
        "training": {
            "tp": config.actor.tp,
            "pp": config.actor.pp,
            "cp": config.actor.cp,
            "recompute": config.actor.recompute == "full",
            "logprob_passes": _logprob_passes(config),
            "micro_step_tokens": config.drafter.sizes("cuda").micro_step_tokens * config.rollout.tp,
        },
    }
    return SimConfig.model_validate(tree)


def _logprob_passes(config: Config) -> int:
    """Passes of log-probs in a step: of what the engine gives none for, of the reference, of the policy beside it where
    their difference is a reward (`trainer/batch_assembly`), and before the first of several mini-batches.
    """
    rl = config.algorithm
    of_engine, has_reference = not CAPABILITIES[config.rollout.backend].logprobs, rl.kl_weight > 0
    return of_engine + has_reference + (has_reference and rl.kl_in == "reward") + (rl.mini_batches > 1)
