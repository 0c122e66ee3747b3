"""Trains until one rank has cached so many responses of a step, and kills that rank with SIGKILL.

argv: CONFIG RANK STEP RESPONSES [overrides]
"""

import os
import signal
import sys

from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.config.load import load_config
from megatron_tlt.config.root import Config
from megatron_tlt.resilience.rollout_cache import ResponseWriter, RolloutCache
from megatron_tlt.trainer.setup import build_trainer


def main(argv):
    path, *numbers = argv[:4]
    rank, step, responses = map(int, numbers)
    config = load_config(path, argv[4:], Config)
    add, begin_step = ResponseWriter.add, RolloutCache.begin_step
    seen = {"rank": -1, "step": 0, "responses": 0}

    def begin(self, number, version):
        seen.update(step=number, responses=0)
        begin_step(self, number, version)

    def add_and_die(self, sample, prompt_crc):
        add(self, sample, prompt_crc)
        seen["responses"] += 1
        if seen == {"rank": rank, "step": step, "responses": responses}:
            os.kill(os.getpid(), signal.SIGKILL)

    def body(world):
        seen["rank"] = world.rank
        trainer = build_trainer(config, world)
        trainer.run()
        trainer.close()

    RolloutCache.begin_step, ResponseWriter.add = begin, add_and_die
    return run_on_every_rank(config.distributed, 1, body)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
