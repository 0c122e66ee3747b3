"""`megatron-tlt train` and `megatron-tlt sft`: training of a policy, by RL or on prompts and completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.options import add_config, read_config
from megatron_tlt.cli.ranks import run_job, run_on_every_rank
from megatron_tlt.distributed.launch import cpu_threads
from megatron_tlt.resilience.signals import StopSignals

if TYPE_CHECKING:
    import argparse


def add_train(commands: Any) -> None:
    """Adds `train` to the parser."""
    _add(commands, "train", "train a policy by reinforcement learning", _train)


def add_sft(commands: Any) -> None:
    """Adds `sft` to the parser."""
    _add(commands, "sft", "fine-tune on prompts and completions", _sft)


def _add(commands: Any, name: str, text: str, run: Any) -> None:
    command = commands.add_parser(name, help=text, description=text)
    add_config(command)
    command.set_defaults(run=run)


def _train(args: argparse.Namespace) -> int:
    signals = StopSignals().install()  # first: importing the rest takes seconds
    from megatron_tlt.config.root import Config

    config = read_config(args, Config)  # mistakes are reported before those seconds
    from megatron_tlt.data.hub import on_this_machine
    from megatron_tlt.distributed.devices import leave_hangs_to_the_watchdog
    from megatron_tlt.trainer.setup import build_trainer

    if config.hang_s:  # the other commands have no watchdog
        leave_hangs_to_the_watchdog()
    return run_on_every_rank(
        config.distributed, cpu_threads(), lambda w: run_job(build_trainer(on_this_machine(config, w), w, signals))
    )


def _sft(args: argparse.Namespace) -> int:
    signals = StopSignals().install()
    from megatron_tlt.config.root import SftConfig

    config = read_config(args, SftConfig)
    from megatron_tlt.data.hub import on_this_machine
    from megatron_tlt.trainer.setup import build_sft_trainer

    return run_on_every_rank(
        config.distributed, None, lambda w: run_job(build_sft_trainer(on_this_machine(config, w), w, signals))
    )
