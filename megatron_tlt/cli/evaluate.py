"""`megatron-tlt eval`: accuracy of a model on a configuration's held-out prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.options import add_config, output_file_problems, read_config
from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.errors import ConfigError

if TYPE_CHECKING:
    import argparse


def add_eval(commands: Any) -> None:
    """Adds the command to the parser."""
    text = "evaluate a model on a config's held-out prompts"
    command = commands.add_parser("eval", help=text, description=text)
    add_config(command)
    command.add_argument("--out", type=Path, help="also write the result as JSON")
    command.set_defaults(run=_eval)


def _eval(args: argparse.Namespace) -> int:
    from megatron_tlt.config.root import Config

    config = read_config(args, Config)
    if problems := output_file_problems("--out", args.out):
        raise ConfigError(problems)
    from megatron_tlt.trainer.setup import run_evaluation

    return run_on_every_rank(
        config.distributed, config.rollout.threads, lambda world: run_evaluation(config, world, args.out)
    )
