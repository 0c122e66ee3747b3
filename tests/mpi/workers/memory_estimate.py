"""Bytes that an update takes, beside `check`'s estimate. Arguments: scratch directory, cases as JSON.

A case is [model, overrides]: one step of full micro-batches on all ranks. What lies there before counts by the tensors'
storages, the rest by every allocation of PyTorch's allocator.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from megatron_tlt.actor.policy import MegatronPolicy
from megatron_tlt.config.load import build_config
from megatron_tlt.config.planning.memory import estimate_memory
from megatron_tlt.config.root import SftConfig
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.world import World
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.writer import save_hf
from megatron_tlt.types import TrainSequence, Trajectory
from tests.helpers.memory import live_bytes
from tests.helpers.tiny_models import random_weights
from tests.mpi.workers.actor_common import WeightedNll, say, train_batch

LENGTH = 256  # of a sequence


def model_of(folder: Path, fields: dict[str, Any]) -> tuple[Path, ModelConfig]:
    """A directory for a model, and its configuration."""
    sizes = {"vocab_size": 8192, "hidden_size": 256, "num_layers": 4, "num_heads": 8, "num_kv_heads": 2}
    sizes |= {"head_dim": 32, "intermediate_size": 512, "max_position_embeddings": 1024} | fields
    family = sizes.pop("family", "qwen3")
    config = ModelConfig(family, tie_word_embeddings=True, qk_norm=family == "qwen3", **sizes)
    return folder, config


def update(world: World, folder: Path, config: ModelConfig, overrides: list[str]) -> dict[str, Any]:
    """One update of full micro-batches with a state that exists already."""
    section = build_config(
        {"model": {"path": str(folder), "max_context": LENGTH}, "sft": {"train_path": "d", "out": "o"}},
        overrides,
        SftConfig,
    )
    actor = section.actor
    policy = MegatronPolicy(world, section.model, actor, section.optimizer, WeightedNll(), 10)
    rng, per_batch = np.random.default_rng(0), actor.micro_batch_tokens // LENGTH

    def step(micro_batches: int) -> None:
        ones, size = np.ones(LENGTH - 1, np.float32), config.vocab_size
        made = [
            TrainSequence(Trajectory(i, 0, rng.integers(0, size, LENGTH), -4 * ones), ones, ones)
            for i in range(micro_batches * per_batch)
        ]
        policy.train_step(train_batch([made], [1.0]))

    step(1)
    with live_bytes() as counted:
        step(actor.pp)
    estimate = estimate_memory(section, config, world.size, "cpu")[policy.groups.at.pp]
    state = storages(policy)
    names = "weights", "adapters", "gradients", "optimizer"
    parts = {name: estimate.parts.get(name, 0) for name in names}
    return {
        "counted": {"state": state, "activations": counted.peak, "all": state + counted.peak},
        "estimate": {
            "state": sum(parts.values()),
            "activations": estimate.parts["activations"],
            "all": estimate.of_phase("update") - estimate.parts["runtime"],
        },
    }


def storages(policy: Any) -> int:
    """Bytes of weights, gradient buffers and optimizer state, each storage once."""
    tensors = [p.data for p in policy.model.module.parameters()] + [b.grad_data for b in policy.ddp.buffers]
    for part in policy.optimizer.chained_optimizers:
        tensors += [p.data for group in part.optimizer.param_groups for p in group["params"]]
        tensors += [v for s in part.optimizer.state.values() for v in s.values() if v.ndim]
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def main() -> None:
    world = World.start(DistributedSection(device="cpu"), threads=1)
    for number, (fields, overrides) in enumerate(json.loads(sys.argv[2])):
        folder, config = model_of(Path(sys.argv[1]) / str(number), fields)
        if world.is_main:
            save_hf(folder, config, random_weights(config))
        world.barrier()
        say(world, ranks=world.all_gather_object(update(world, folder, config, overrides)))
    world.close()


if __name__ == "__main__":
    main()
