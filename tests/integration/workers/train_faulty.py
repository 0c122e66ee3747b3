"""Trains while something goes wrong. argv: FAULT CONFIG [overrides]

nan:2,3        the loss of these steps is not a number
read-only:3    run_dir/checkpoints is mounted read-only just before the save of this step (root)
small-files    no file may grow beyond 64 KiB, as on a disk that is full
"""

import os
import resource
import subprocess
import sys

from megatron_tlt.actor import train_step
from megatron_tlt.checkpoint.manager import CheckpointManager
from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.config.load import load_config
from megatron_tlt.config.root import Config
from megatron_tlt.trainer.setup import build_trainer


def main(argv):
    kind, _, numbers = argv[0].partition(":")
    steps = {int(number) for number in numbers.split(",") if number}
    config = load_config(argv[1], argv[2:], Config)
    maybe_save, loss_of = CheckpointManager.maybe_save, train_step._loss_of

    def save_read_only(self, step, *arguments):
        if step in steps and self._world.is_main:
            folder = os.path.join(config.train.run_dir, "checkpoints")
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        maybe_save(self, step, *arguments)

    def body(world):
        trainer = build_trainer(config, world)

        def loss(*arguments):
            value, metrics = loss_of(*arguments)
            return (value * float("nan") if trainer.state.step + 1 in steps else value), metrics

        if kind == "nan":
            train_step._loss_of = loss
        if kind == "small-files":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        trainer.run()
        trainer.close()

    if kind == "read-only":
        CheckpointManager.maybe_save = save_read_only
    return run_on_every_rank(config.distributed, 1, body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
