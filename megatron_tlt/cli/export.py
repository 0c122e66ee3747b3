"""`megatron-tlt export`: a run's checkpoint as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.options import add_config, read_config
from megatron_tlt.cli.ranks import run_on_every_rank

if TYPE_CHECKING:
    import argparse


def add_export(commands: Any) -> None:
    """Adds the command to the parser."""
    text = "write a run's checkpoint as a Hugging Face directory"
    command = commands.add_parser("export", help=text, description=text)
    add_config(command)
    command.add_argument("--out", type=Path, required=True, help="directory to write")
    command.add_argument("--dtype", choices=("fp32", "bf16"), help="default: actor.dtype")
    command.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    from megatron_tlt.config.root import Config

    config = read_config(args, Config)
    from megatron_tlt.trainer.setup import run_export

    return run_on_every_rank(
        config.distributed, None, lambda world: run_export(config, world, args.out, args.dtype)
    )
