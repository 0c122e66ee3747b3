"""One of the two ranks that `doctor` starts: it meets the other through MPI and torch.distributed, as in a run."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.world import World

MET = "both ranks met"


def main() -> int:
    """argv: seconds to wait for the other. Prints `MET` and the backend on rank 0; 1 if a sum is wrong."""
    world = World.start(DistributedSection(timeout_s=float(sys.argv[1])))
    expected = world.size * (world.size + 1) // 2
    by_mpi = sum(world.comm.allgather(world.rank + 1))
    value = torch.tensor([world.rank + 1.0], device=world.device)
    dist.all_reduce(value)
    right = world.size == 2 and by_mpi == expected and float(value) == expected
    if world.is_main and right:
        backend = "NCCL" if world.device.type == "cuda" else "gloo"
        print(f"{MET} (MPI and {backend})", flush=True)
    world.close()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
