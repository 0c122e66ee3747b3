"""One of the two ranks that `doctor` starts: it meets the other through MPI and torch.distributed, as in a run.

On CPUs: the machine may have one GPU, and the launcher none for a test.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.world import World


def main() -> str | None:
    """argv: seconds to wait for the other. Returns what is wrong."""
    world = World.start(DistributedSection(device="cpu", timeout_s=float(sys.argv[1])))
    value = torch.tensor([world.rank + 1.0])
    dist.all_reduce(value)
    found = world.size, sum(world.comm.allgather(world.rank + 1)), float(value)
    world.close()
    return None if found == (2, 3, 3.0) else f"Error: size and sums of two ranks are {found}"


if __name__ == "__main__":
    sys.exit(main())
