"""The number of KV-cache blocks that one rank allocates. The decoder allocates them: the layout is its own."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from megatron_tlt.errors import BackendError

CPU_SHARE = 0.25  # of the memory free now, for all ranks of this machine together
CUDA_SHARE = 0.5  # of the memory free now, for an engine without a memory plan: later allocations need the rest


def choose_num_blocks(
    block_bytes: int,
    *,
    block_size: int,
    max_running: int,
    max_context: int,
    budget_bytes: int | None,
    device: torch.device,
    local_ranks: int = 1,
    longest_request: int = 0,
) -> int:
    """Blocks that `max_running` requests of `max_context` tokens need, or as many as the memory budget has room for.

    The budget is `budget_bytes`, or a share of the memory free now (split over the machine's `local_ranks` on CPU).
    Blocks that are never used take no memory. Raises BackendError if there is no room for one request of
    `longest_request` tokens.
    """
    most = max_running * -(-max_context // block_size) + 1
    if budget_bytes is not None:
        budget = budget_bytes
    elif device.type == "cuda":
        budget = int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE)
    else:
        budget = int(free_memory() * CPU_SHARE) // max(1, local_ranks)
    count = min(most, budget // block_bytes)
    least = -(-longest_request // block_size) + 1  # samples of a prompt need a copy of its last block
    if count < least:
        raise BackendError(
            f"a request of {longest_request} tokens needs {least} KV-cache blocks of {block_bytes} bytes, the budget "
            f"of {budget} bytes has room for {count}: raise rollout.kv_cache_mib"
        )
    return count


def free_memory() -> int:
    """Bytes that this process may still allocate: the machine's available memory, within the cgroup's limit."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    info = _read(Path("/proc/meminfo"))
    for line in info.splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def total_memory() -> int:
    """Bytes that the machine has, or this process's cgroup allows."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(Path("/sys/fs/cgroup/memory.max")).strip()
    return min(total, int(limit)) if limit.isdigit() else total


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
