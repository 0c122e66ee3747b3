"""`megatron-tlt status RUN_DIR`: the state of every rank of a run, the worst first. Needs no MPI and no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.exit_codes import BAD_INPUT, FAILED, OK
from megatron_tlt.errors import ConfigError, no_such_file
from megatron_tlt.resilience.status import read_status, status_text

if TYPE_CHECKING:
    import argparse

_SHOWN = 32  # ranks without --all: a screen


def add_status(commands: Any) -> None:
    """Adds the command to the parser."""
    text = "show what every rank of a run does, the worst first"
    about = f"{text}. Exit status: 0 running, finished, saved or ended, 1 crashed, hung or lost, 2 nothing is known."
    command = commands.add_parser("status", help=text, description=about)
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="train.run_dir of the run")
    command.add_argument("--json", action="store_true", help="as JSON, all ranks")
    command.add_argument("--all", action="store_true", help=f"all ranks, not the {_SHOWN} worst")
    command.set_defaults(run=_status)


def _status(args: argparse.Namespace) -> int:
    try:
        if not args.run_dir.is_dir():
            allowed = f"must be the directory of a run: {no_such_file(args.run_dir)}"
            raise ConfigError.of("RUN_DIR", str(args.run_dir), allowed)
        status = read_status(args.run_dir)
    except PermissionError as error:
        allowed = f"must be a run that you may read: {error.filename}: {error.strerror}"
        raise ConfigError.of("RUN_DIR", str(args.run_dir), allowed) from error
    if args.json:
        print(json.dumps(status.as_json(), indent=2))
    else:
        print(status_text(args.run_dir, status, 0 if args.all else _SHOWN))
    if status.condition == "unknown":
        return BAD_INPUT
    return FAILED if status.condition in ("crashed", "hung", "lost") else OK
