"""`megatron-tlt sft`: supervised fine-tuning on prompts and completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.exit_codes import OK, SAVED
from megatron_tlt.cli.options import add_config, read_config
from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.resilience.signals import StopSignals

if TYPE_CHECKING:
    import argparse

    from megatron_tlt.distributed.world import World


def add_sft(commands: Any) -> None:
    """Adds the command to the parser."""
    text = "fine-tune on prompts and completions"
    command = commands.add_parser("sft", help=text, description=text)
    add_config(command)
    command.set_defaults(run=_sft)


def _sft(args: argparse.Namespace) -> int:
    signals = StopSignals().install()  # first: importing the rest takes seconds
    from megatron_tlt.config.root import SftConfig

    config = read_config(args, SftConfig)
    from megatron_tlt.data.hub import on_this_machine
    from megatron_tlt.trainer.setup import build_sft_trainer

    def body(world: World) -> int:
        trainer = build_sft_trainer(on_this_machine(config, world), world, signals)
        stopped = trainer.run()
        trainer.close()
        return SAVED if stopped else OK

    return run_on_every_rank(config.distributed, None, body)
