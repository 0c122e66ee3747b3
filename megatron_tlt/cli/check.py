"""`megatron-tlt check`: whether a configuration can run, the place of each rank and its memory. Starts no ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.exit_codes import OK
from megatron_tlt.cli.options import add_config, read_config
from megatron_tlt.config.checks.commands import check_num_ranks
from megatron_tlt.distributed.launch import detect_launch
from megatron_tlt.errors import ConfigError

if TYPE_CHECKING:
    import argparse


def add_check(commands: Any) -> None:
    """Adds the command to the parser."""
    text = "report whether a config can run, the place of each rank and its memory"
    command = commands.add_parser("check", help=text, description=text)
    add_config(command)
    command.add_argument("--ranks", type=int, help="number of ranks (default: cluster.nodes * ranks_per_node)")
    command.add_argument("--sft", action="store_true", help="a config of `sft`, not of `train`")
    command.add_argument("--fetch", action="store_true", help="fetch what the config names on the Hugging Face hub")
    command.add_argument("--elsewhere", action="store_true", help="files that are not on this machine are warnings")
    command.add_argument("--all", action="store_true", help="also the parts of memory that round to 0.00 GiB")
    command.add_argument("--show-config", action="store_true", help="print the whole configuration, with all defaults")
    command.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    from megatron_tlt.config.load import dump_config
    from megatron_tlt.config.root import Config, SftConfig
    from megatron_tlt.data.hub import on_this_machine
    from megatron_tlt.distributed.together import SingleProcess
    from megatron_tlt.trainer.preflight import check_report

    if problems := [*check_num_ranks(args.ranks)]:
        raise ConfigError(problems)
    config = read_config(args, SftConfig if args.sft else Config)
    if args.fetch:
        on_this_machine(config, SingleProcess())
    report = check_report(config, args.ranks, args.elsewhere, args.all)
    if detect_launch().rank not in (0, None):  # started as several ranks: one copy is enough
        return OK
    print(f"Resolved configuration\n{dump_config(config)}\n{report}" if args.show_config else report)
    return OK
