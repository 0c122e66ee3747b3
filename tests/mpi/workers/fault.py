"""One rank raises, all do, or one does not arrive at a barrier; argv: how, which rank."""

import os
import signal
import sys
import time

from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed import world as world_module
from megatron_tlt.distributed.world import World
from megatron_tlt.errors import TrainingError


def body(world: World) -> None:
    how, rank = sys.argv[1], int(sys.argv[2])
    world.barrier()  # a rank that is stopped while the others still connect to it leaves them in phase start
    world.enter("rollout", 3)
    if how == "shared":
        raise TrainingError("made to fail")
    if world.rank == rank:
        if how == "raise":
            raise RuntimeError("made to fail")
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    world.enter("exchange", 3)
    world.barrier()


def stop_in_start(*arguments: object, **options: object) -> None:
    if os.environ["PMI_RANK"] == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGSTOP)
    connect(*arguments, **options)


connect = world_module.dist.init_process_group
if sys.argv[1] == "start":
    world_module.dist.init_process_group = stop_in_start
world_module._STORE_S = 2.0
sys.exit(run_on_every_rank(DistributedSection(timeout_s=4), 1, body))
