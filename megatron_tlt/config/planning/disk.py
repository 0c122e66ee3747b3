"""What a run takes on the disk of its run directory: checkpoints, and responses that no checkpoint covers yet."""

from __future__ import annotations

from megatron_tlt.config.dims import Dims
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.planning.parameters import (
    adapter_parameters,
    drafter_parameters,
    element_bytes,
    total_parameters,
)
from megatron_tlt.config.root import TrainingConfig
from megatron_tlt.config.run import ROLLOUT_CACHE_BYTES
from megatron_tlt.interfaces import CAPABILITIES


def gb(size: float) -> str:
    """Bytes as text, in GB of 1e9, as disks are sold."""
    return f"{size / 1e9:,.0f} GB" if size >= 1e12 else f"{size / 1e9:.3g} GB"


def checkpoint_bytes(config: TrainingConfig, shape: ArchitectureConfig) -> int:
    """Of one checkpoint: trained weights, their master weights in bf16, moments; a trained drafter's, in fp32."""
    lora, element, rl = config.actor.lora, element_bytes(config.actor.dtype), config.rl
    whole = Dims.fit(1, tp=1, pp=1)
    trained = total_parameters(shape) if lora is None else sum(adapter_parameters(shape, lora, whole, 0))
    moments = 8 if config.optimizer.name == "adam" else 0
    size = trained * (element + (4 if element < 4 else 0) + moments)
    return size if rl is None or not rl.idle.train_drafter else size + 16 * drafter_parameters(rl, shape)


def disk_lines(config: TrainingConfig, shape: ArchitectureConfig, num_ranks: int) -> list[str]:
    """What checkpoints and rollout cache take at most."""
    size, most = checkpoint_bytes(config, shape), config.checkpoint.keep + 1
    lines = [f"On disk: a checkpoint {gb(size)}, up to {most} at once (checkpoint.keep + 1): {gb(most * size)}"]
    keeps = config.rl is not None and CAPABILITIES[config.rl.rollout.backend].keyed_sampling
    if config.rl is not None and keeps and config.rl.rollout_cache.enabled:
        replicas = num_ranks // config.rl.rollout.tp
        lines.append(f"  rollout cache at most {gb(replicas * ROLLOUT_CACHE_BYTES)}")
    return lines
