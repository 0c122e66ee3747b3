"""Every rank sends numbered items to known ranks and checks what arrives."""

import numpy as np
import torch
from torch.distributed import distributed_c10d

from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.exchange import gather_columns, gather_large, redistribute
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

# Of one large value no rank hands torch more than its bytes, in any collective: an all-gather would pad all to it.
handed = []


def counted(collective):
    def call(tensors, *others, **named):
        for tensor in (tensors, *others):
            handed.extend(t.nbytes for t in (tensor if isinstance(tensor, list) else [tensor]) if torch.is_tensor(t))
        return collective(tensors, *others, **named)

    return call


for name in ("broadcast", "all_gather", "all_gather_into_tensor"):
    setattr(distributed_c10d, name, counted(getattr(distributed_c10d, name)))
large = gather_large(world, bytes(1 << 20) if world.rank == world.size - 1 else None)
assert [len(value) for value in large] == [1 << 20]
assert max(handed, default=0) <= (1 << 20) + 1000 and sum(handed) <= (1 << 20) + 10_000, handed
assert gather_large(world, None) == [] and gather_large(world, (world.rank,)) == [(r,) for r in range(world.size)]
print(f"ok {world.rank}", flush=True)
world.close()
