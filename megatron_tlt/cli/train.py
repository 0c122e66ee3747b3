"""`megatron-tlt train`: reinforcement learning of a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.exit_codes import OK, SAVED
from megatron_tlt.cli.options import add_config, read_config
from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.distributed.launch import cpu_threads
from megatron_tlt.resilience.signals import StopSignals

if TYPE_CHECKING:
    import argparse

    from megatron_tlt.distributed.world import World


def add_train(commands: Any) -> None:
    """Adds the command to the parser."""
    text = "train a policy by reinforcement learning"
    command = commands.add_parser("train", help=text, description=text)
    add_config(command)
    command.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    signals = StopSignals().install()  # first: importing the rest takes seconds
    from megatron_tlt.config.root import Config

    config = read_config(args, Config)  # mistakes are reported before those seconds
    from megatron_tlt.data.hub import on_this_machine
    from megatron_tlt.trainer.setup import build_trainer

    def body(world: World) -> int:
        trainer = build_trainer(on_this_machine(config, world), world, signals)
        stopped = trainer.run()
        trainer.close()
        return SAVED if stopped else OK

    return run_on_every_rank(config.distributed, cpu_threads(), body)
