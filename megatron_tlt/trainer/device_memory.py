"""The memory plan on the GPUs that there are: their size as its limit, and the KV cache that it leaves room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_tlt.config.planning.memory import KV, estimate_memory
from megatron_tlt.config.planning.parameters import GIB
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.config import ModelConfig

if TYPE_CHECKING:
    from megatron_tlt.config.root import Config
    from megatron_tlt.distributed.world import World


def planned_cache_bytes(config: Config, world: World) -> int | None:
    """The KV cache of one rank by the memory plan (`check` prints it); None on CPU, where engines choose by themselves.

    Needs `cluster.memory_gib` on CUDA: see `with_device_memory`.
    """
    if world.device.type == "cpu":
        return None
    shape = ModelConfig.from_hf(config.model.path)
    return estimate_memory(config, shape, world.size, "cuda")[0].parts[KV]


def with_device_memory(config: Config, world: World) -> Config:
    """`config` with `cluster.memory_gib` on CUDA: where none is set, that of the smallest GPU. Collective.

    Raises ConfigError if a GPU has less than is configured.
    """
    if world.device.type == "cpu":
        return config
    total = min(world.all_gather_object(torch.cuda.mem_get_info(world.device)[1] / GIB))
    limit = config.cluster.memory_gib
    if limit is None:
        cluster = config.cluster.model_copy(update={"memory_gib": total})
        return config.model_copy(update={"cluster": cluster})
    if limit > total:
        raise ConfigError.of("cluster.memory_gib", limit, f"must be <= {total:.2f}: a GPU here has no more")
    return config
