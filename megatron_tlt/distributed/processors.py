"""What the ranks compute on: a result has other last bits on another kind of processor."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tlt.config.dims import rollout_replica

if TYPE_CHECKING:
    import torch

    from megatron_tlt.distributed.together import Ranks

# Those that products are chosen by.
_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve", "sve2")


def cpu_lines(*fields: str) -> set[str]:
    """The lines of /proc/cpuinfo that begin with one of `fields`, equal ones once; none where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {line for line in lines if line.startswith(fields)}


def cpu_sets() -> list[str]:
    """Instruction sets of this CPU that choose how numbers are multiplied; empty where the system does not say."""
    words = {word for line in cpu_lines("flags", "Features") for word in line.split()}
    return [name for name in _SETS if name in words]


def has_bf16_products() -> bool:
    """Whether this CPU multiplies bf16 without a conversion."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpu_sets())


def processor(device: torch.device) -> str:
    """The kind of this rank's processor, as far as it chooses how numbers are multiplied."""
    if device.type == "cuda":
        import torch  # `check` reads this module without it

        return torch.cuda.get_device_name(device)
    return " ".join([platform.machine(), *cpu_sets()])


def engine_cpus(ranks: Ranks, tp: int) -> frozenset[int]:
    """The CPUs of the `tp` ranks of this rank's engine, which are on one host. Collective."""
    everywhere = ranks.all_gather_object(os.sched_getaffinity(0))  # a launcher may bind each rank to its own
    replica = rollout_replica(ranks.rank, tp)
    return frozenset().union(*everywhere[replica * tp : (replica + 1) * tp])


def mixed_processors(kinds: Sequence[str]) -> str | None:
    """A warning where ranks differ; `kinds` by rank."""
    if len(set(kinds)) == 1:
        return None
    ranks = {kind: [str(rank) for rank, of in enumerate(kinds) if of == kind] for kind in kinds}
    said = "; ".join(f"{kind}: rank {', '.join(at[:8])}{' ..' if len(at) > 8 else ''}" for kind, at in ranks.items())
    return (
        f"the ranks have different processors ({said}): a response then depends on which rank decodes it, and TLT on "
        "and off, or a run and its repetition, need not give the same bits"
    )
