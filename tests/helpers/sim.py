"""Simulations small enough for a test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megatron_tlt.config.load import build_config
from megatron_tlt.config.sim import SimConfig
from megatron_tlt.sim import decisions
from megatron_tlt.sim.rollouts import ReplicaRollout

MODEL = {
    "family": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "num_layers": 28,
    "num_heads": 28,
    "num_kv_heads": 4,
    "head_dim": 128,
    "intermediate_size": 18944,
}


@pytest.fixture(autouse=True, scope="module")
def few_steps() -> Iterator[None]:
    """In modules that import it selectors are asked for a quarter of the steps, so rates are means of few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decisions, "_SETTLE", 32)
        patch.setattr(decisions, "_MEASURED", 32)
        yield


def sim_config(*overrides: str, **sections: Any) -> SimConfig:
    """A 7B model on one node of 8 H100, 32 prompts of 4 samples, responses of about 300 tokens; no pre-rollouts."""
    base: dict[str, Any] = {
        "model": MODEL,
        "workload": {"steps": 2, "prompts_per_step": 32, "lengths": {"median": 250, "sigma": 0.8}},
        "rollout": {"samples_per_prompt": 4, "max_tokens": 2048, "max_batched_tokens": 8192},
        "idle": {"pre_rollout": False},
        "training": {"tp": 2},
    }
    return build_config(base | sections, overrides, SimConfig)


def groups_of(
    seed: int, prompts: int, samples: int, median: float = 150.0, most: int = 2048
) -> list[np.ndarray]:
    """Response lengths of some prompts."""
    rng = np.random.default_rng(seed)
    drawn = np.exp(np.log(median) + 0.8 * rng.standard_normal((prompts, samples)))
    return list(np.clip(drawn.astype(int), 2, most))


def straight(ends: list[float], rate: float = 100.0, requests: int = 4) -> list[ReplicaRollout]:
    """Replicas whose requests all run, at `rate` tokens a second each, until `ends`."""
    made = []
    for end in ends:
        made.append(ReplicaRollout(end, np.full(requests, int(rate * end))))
    return made
