"""Trains until one rank has cached so many answers of a step, and kills that rank with SIGKILL.

argv: CONFIG RANK STEP ANSWERS [overrides]
"""

import os
import signal
import sys

from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.config.load import load_config
from megatron_tlt.config.root import Config
from megatron_tlt.resilience.rollout_cache import AnswerWriter, RolloutCache
from megatron_tlt.trainer.setup import build_trainer


def main(argv):
    path, *numbers = argv[:4]
    rank, step, answers = map(int, numbers)
    config = load_config(path, argv[4:], Config)
    add, begin_step = AnswerWriter.add, RolloutCache.begin_step
    seen = {"rank": -1, "step": 0, "answers": 0}

    def begin(self, number, version):
        seen.update(step=number, answers=0)
        begin_step(self, number, version)

    def add_and_die(self, sample, prompt_crc):
        add(self, sample, prompt_crc)
        seen["answers"] += 1
        if seen == {"rank": rank, "step": step, "answers": answers}:
            os.kill(os.getpid(), signal.SIGKILL)

    def body(world):
        seen["rank"] = world.rank
        trainer = build_trainer(config, world)
        trainer.run()
        trainer.close()

    RolloutCache.begin_step, AnswerWriter.add = begin, add_and_die
    return run_on_every_rank(config.distributed, 1, body)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
