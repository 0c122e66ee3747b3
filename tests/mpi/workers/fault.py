"""One rank raises, or does not arrive at a barrier; argv: how, which rank."""

import sys
import time

from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.world import World


def body(world: World) -> None:
    how, rank = sys.argv[1], int(sys.argv[2])
    world.enter("rollout", 3)
    if world.rank == rank:
        if how == "raise":
            raise RuntimeError("made to fail")
        time.sleep(60)
    world.enter("exchange", 3)
    world.barrier()


sys.exit(run_on_every_rank(DistributedSection(timeout_s=4), 1, body))
