"""`megatron-tlt train` that is killed in the idle window behind a step, in its third decoding step of a pre-rollout.

argv: the step (1-based), then the command's arguments.
"""

import os
import signal
import sys

from megatron_tlt.cli import main as cli
from megatron_tlt.trainer.pre_rollouts import PreRollouts

OPEN, GENERATE = PreRollouts.open, PreRollouts._generate
seen = {"step": 0}


def open_(self, step):
    seen["step"] = step
    return OPEN(self, step)


def generate(self, queue_of, until):
    calls = 0

    def asked():
        nonlocal calls
        calls += 1
        if seen["step"] != int(sys.argv[1]):
            return until()
        if calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return False  # however soon the other rank is done

    return GENERATE(self, queue_of, asked)


PreRollouts.open, PreRollouts._generate = open_, generate
sys.exit(cli.main(sys.argv[2:]))
