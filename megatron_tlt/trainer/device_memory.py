"""The memory plan on the machines that there are: their sizes as its limits, and the KV cache it leaves room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_tlt.config.planning.memory import KV, estimate_memory
from megatron_tlt.config.planning.parameters import GIB
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.rollout.kv_cache import total_memory

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
    """`config` with `cluster.memory_gib` and `host_memory_gib` on CUDA: where they are not set, those of the smallest
    GPU and node; and with the `ranks_per_node` that there are. Collective.

    Raises ConfigError if a GPU or a node has less than is configured.
    """
    if world.device.type == "cpu":
        return config
    here = torch.cuda.mem_get_info(world.device)[1] / GIB, total_memory() / GIB, world.local_size
    gpus, hosts, ranks = zip(*world.all_gather_object(here), strict=True)
    cluster = config.cluster.model_copy(update={"ranks_per_node": max(ranks)})
    for name, total in (("memory_gib", min(gpus)), ("host_memory_gib", min(hosts))):
        limit = getattr(cluster, name)
        if limit is None:
            cluster = cluster.model_copy(update={name: total})
        elif limit > total:
            owner = "GPU" if name == "memory_gib" else "node"
            raise ConfigError.of(f"cluster.{name}", limit, f"must be <= {total:.2f}: a {owner} here has no more")
    return config.model_copy(update={"cluster": cluster})
