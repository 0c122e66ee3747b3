"""A rank whose heap is full of data when MPI starts: says how many there are."""

import sys

from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.world import World
from tests.helpers.heap import dirty

for size in (512, 1024, 2048, 4096, 4500, 5000, 6000, 8192, 16384):
    dirty(size)
world = World.start(DistributedSection())
print(f"world of {world.size}", file=sys.stderr, flush=True)
world.close()
