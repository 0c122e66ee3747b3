"""The memory plan on the machines of a run: limits from their sizes, and the size of the KV cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_tlt.config.planning.engine import least_cache_bytes
from megatron_tlt.config.planning.memory import KV, RESERVE, beside_cache, estimate_memory
from megatron_tlt.config.planning.parameters import GIB
from megatron_tlt.errors import ConfigError, ConfigProblem
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.rollout.kv_cache import total_memory

if TYPE_CHECKING:
    from megatron_tlt.config.root import Config
    from megatron_tlt.data.hub import RootT
    from megatron_tlt.distributed.tensor_parallel import TensorParallel
    from megatron_tlt.distributed.world import World

_log = logging.getLogger(__name__)

_LARGE = 1 << 21  # elements of fp32 that NCCL sends by its protocol for large messages
# Bytes outside PyTorch that come later: kernels' modules at their first use, NCCL's channels between pairs (PP, EP,
# CP). A guess until a GPU has given the number.
_LATER = GIB // 2


def let_segments_grow(device: torch.device, by_handles: bool = False) -> None:
    """Lets PyTorch's segments of a GPU grow, so that less is lost to fragmentation; before its first tensor.

    Not where the environment configures its allocator, and not where an engine in a process of its own gets weights
    `by_handles`: those of such segments differ by PyTorch's version (`backends/transport.py`). By a call, for engines
    in processes of their own would inherit a variable, and an engine that puts weights to sleep needs plain memory.
    """
    if device.type == "cuda" and not _allocator_settings() and not by_handles:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def handle_problems(config: Config, device: torch.device) -> list[ConfigProblem]:
    """Weights that go by handles of GPU memory, where the environment makes that of expandable segments."""
    settings = _allocator_settings()
    if not config.by_handles(device.type) or "expandable_segments:true" not in settings.lower().replace(" ", ""):
        return []
    allowed = (
        f"sends handles of plain memory only, and the allocator is set to {settings}: must be 'shared_memory', or "
    )
    allowed += "remove expandable_segments from PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"
    return [ConfigProblem("sync.transport", config.sync.transport, allowed)]


def _allocator_settings() -> str:
    """Those of the environment, as PyTorch reads it."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def open_communicators(groups: Sequence[dist.ProcessGroup], engine: TensorParallel, device: torch.device) -> None:
    """Sends in every group and in the engine's, small and large: NCCL opens a communicator at its first message. What
    it takes is then there before the KV cache is sized, but for channels between pairs, which open at their first use.
    Collective, `groups` in one order on all ranks.
    """
    for tensor in (torch.zeros(size, device=device) for size in (1, _LARGE)):
        for group in groups:
            dist.all_reduce(tensor, group=group)
        engine.all_reduce(tensor)


def cache_bytes(config: Config, world: World) -> int | None:
    """The KV cache of one rank, the same on all: by the memory plan (`check` prints it), or as much of it as every
    GPU has left beside the plan's later allocations; None on CPU, where engines choose by themselves. Collective on
    CUDA.

    Needs `cluster.memory_gib` there: see `with_device_memory`. Raises ConfigError on all ranks if less remains than a
    request of full length needs.
    """
    if world.device.type == "cpu":
        return None
    shape = ModelConfig.from_hf(config.model.path).architecture
    stages = estimate_memory(config, shape, world.size, "cuda")
    planned, reserve = stages[0].parts[KV], stages[0].parts[RESERVE]
    if config.rollout.cache_share is not None:  # the engine takes it by itself
        return planned
    total, outside, allocated = device_use(world.device)
    taken = max(outside + _LATER, reserve)
    left = total - taken - max(allocated, beside_cache(config, stages))
    found = world.all_gather_object((left, outside, allocated))
    rank, (left, outside, allocated) = min(enumerate(found), key=lambda one: one[1][0])
    if left >= planned:
        return planned
    there = (
        f"rank {rank} has {left / GIB:.2f} GiB for its KV cache: {outside / GIB:.2f} GiB of its GPU are taken outside "
        f"PyTorch (cluster.reserve_gib: {reserve / GIB:g}), {allocated / GIB:.2f} by it"
    )
    if left < (least := least_cache_bytes(config, shape)):
        allowed = f"one request of full length needs {least / GIB:.2f} GiB, and {there}"
        raise ConfigError.of("cluster.memory_gib", config.cluster.memory_gib, allowed)
    if world.is_main:
        _log.warning("the memory plan's KV cache of %.2f GiB is not there: %s", planned / GIB, there)
    return left


def device_use(device: torch.device) -> tuple[int, int, int]:
    """Bytes of a GPU: its memory, the part in use outside PyTorch's allocator, the part reserved by it."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return total, total - free - reserved, reserved


def with_device_memory(config: RootT, world: World) -> RootT:
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
