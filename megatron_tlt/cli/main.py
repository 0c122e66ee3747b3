"""`megatron-tlt`: the parser, and how errors become exit codes (`exit_codes`)."""

from __future__ import annotations

import argparse
import io
import os
import sys

from megatron_tlt.cli.check import add_check
from megatron_tlt.cli.doctor import add_doctor
from megatron_tlt.cli.drafter import add_drafter
from megatron_tlt.cli.evaluate import add_eval
from megatron_tlt.cli.exit_codes import BAD_INPUT, FAILED, INTERRUPTED
from megatron_tlt.cli.export import add_export
from megatron_tlt.cli.generate import add_generate
from megatron_tlt.cli.ranks import print_problems
from megatron_tlt.cli.report import add_report
from megatron_tlt.cli.simulate import add_simulate
from megatron_tlt.cli.status import add_status
from megatron_tlt.cli.train import add_sft, add_train
from megatron_tlt.distributed.launch import detect_launch
from megatron_tlt.errors import ConfigError, DataError, TltError, printable
from megatron_tlt.observe.attempt import note_exit, wait_for_exit_note

_COMMANDS = (
    add_train,
    add_sft,
    add_eval,
    add_export,
    add_check,
    add_generate,
    add_drafter,
    add_status,
    add_doctor,
    add_report,
    add_simulate,
)


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns its exit code: 0, 1 (failed) or 2 (arguments, configuration or input files are wrong).

    It does not return where a signal ended a run after a checkpoint (its ranks exit with 75), and after Ctrl-C (130).
    """
    open_closed_streams()
    args = _parse(argv)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except (ConfigError, DataError) as error:
        # Every rank finds the same problems; one copy is enough.
        if detect_launch().rank in (0, None) or not wait_for_exit_note():
            print_problems(error)
            note_exit(BAD_INPUT)
        return BAD_INPUT
    except BrokenPipeError:  # `| head` has read enough; the rest of the buffer must not fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FAILED
    except (TltError, OSError) as error:
        print(printable(f"megatron-tlt: {type(error).__name__}: {error}"), file=sys.stderr)
        note_exit(FAILED)
        return FAILED
    except KeyboardInterrupt:
        if detect_launch().rank in (0, None):
            print("megatron-tlt: ended by Ctrl-C", file=sys.stderr, flush=True)
        note_exit(INTERRUPTED)
        os._exit(INTERRUPTED)  # an interpreter that is torn down within an import of torch may crash


def open_closed_streams() -> None:
    """Opens /dev/null in place of standard streams that services and cron have closed (`>&-`): the next file that is
    opened would get the number of one, and all output with it. Characters that standard output cannot encode become
    "?": they must not end a run.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)  # the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Overrides may also stand behind options, where argparse alone takes none."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest:
        from megatron_tlt.config.load import is_file

        strays = [word for word in rest if word.startswith("-") or not ("=" in word or is_file(word))]
        if "overrides" not in args or strays:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        args.overrides = [*args.overrides, *rest]
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-tlt", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add_command in _COMMANDS:
        add_command(commands)
    return parser
