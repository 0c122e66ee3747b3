"""Every rank sends numbered items to known ranks and checks what arrives."""

import numpy as np

from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.exchange import gather_columns, redistribute
from megatron_tlt.distributed.world import World

world = World.start(DistributedSection(), threads=1)
items = [((world.rank, i), [(world.rank + i) % world.size, 0]) for i in range(5)]
got = redistribute(world, items)
expected = [
    (source, i)
    for source in range(world.size)
    for i in range(5)
    for to in ((source + i) % world.size, 0)
    if to == world.rank
]
assert got == expected, (world.rank, got, expected)
# no rank sends anything; only one sends; a large payload
assert redistribute(world, []) == []
only = redistribute(world, [(np.arange(300_000), [world.size - 1])] if world.rank == 0 else [])
assert len(only) == (world.rank == world.size - 1) and all(int(a[-1]) == 299_999 for a in only)
columns = gather_columns(world, {"rank": np.full(world.rank, world.rank)})
assert columns["rank"].tolist() == [r for r in range(world.size) for _ in range(r)]
print(f"ok {world.rank}", flush=True)
world.close()
