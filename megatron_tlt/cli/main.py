"""`megatron-tlt`: the parser, and how errors become exit codes (`exit_codes`)."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from contextlib import suppress
from functools import partial

from megatron_tlt.cli.check import add_check
from megatron_tlt.cli.doctor import add_doctor
from megatron_tlt.cli.drafter import add_drafter
from megatron_tlt.cli.evaluate import add_eval
from megatron_tlt.cli.exit_codes import BAD_INPUT, FAILED, INTERRUPTED, OK, SAVED
from megatron_tlt.cli.export import add_export
from megatron_tlt.cli.generate import add_generate
from megatron_tlt.cli.ranks import print_problems, report_interrupt
from megatron_tlt.cli.report import add_report
from megatron_tlt.cli.simulate import add_simulate
from megatron_tlt.cli.status import add_status
from megatron_tlt.cli.streams import drop_unwritable, open_closed_streams
from megatron_tlt.cli.train import add_sft, add_train
from megatron_tlt.distributed.launch import detect_launch
from megatron_tlt.distributed.mpi import START_S, bounded_start, has_started, start_mpi
from megatron_tlt.errors import ConfigError, DataError, TltError, printable
from megatron_tlt.observe.attempt import note_exit

_ON_RANKS = ("train", "sft", "eval", "generate", "export", "drafter")  # these commands start MPI
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


_ABOUT = "Reinforcement learning of language models on Megatron-core, with speculative rollouts."
_EXIT_CODES = (
    f"Exit codes: {OK} done; {FAILED} failed; {BAD_INPUT} arguments, configuration or input files are wrong; {SAVED} a "
    f"signal ended a training after its state was saved, and the same command resumes it; {INTERRUPTED} ended by "
    "Ctrl-C, and nothing was saved but finished responses; 143 `export` ended by SIGTERM, and nothing was saved."
)
_SETTING = re.compile(r"--\w+(\.\w+)+(=|$)")  # as options of other programs


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns its exit code: 0, 1 (failed) or 2 (arguments, configuration or input files are wrong).

    A run that a signal ended after a checkpoint does not return: its ranks exit with 75. Nor does a job in which a
    rank fails before the ranks have met.
    """
    open_closed_streams()
    drop_unwritable("stderr")  # an error must not hide behind another one
    try:
        args = _parse(argv)
    except SystemExit as end:
        if end.code:  # not of --help
            note_exit(BAD_INPUT)
        raise
    if args.command == "sft" or "train" in (args.command, getattr(args, "action", None)):
        drop_unwritable("stdout")  # a training is worth more than its output; others are run for theirs
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has read enough; the rest of the buffer must not fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FAILED
    except KeyboardInterrupt as error:
        code, _ = report_interrupt(detect_launch().rank in (0, None), error)
        os._exit(code)  # an interpreter that is torn down within an import of torch may crash
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks would wait for this one for ever
        code = BAD_INPUT if isinstance(error, ConfigError | DataError) else FAILED
        report = partial(_report, error, code)
        if args.command in _ON_RANKS and detect_launch().size != 1 and not has_started():
            note_exit(code)  # a start that takes too long ends this process here
            with suppress(Exception), bounded_start(START_S):  # MPI that does not start must not hide the error
                start_mpi(code, report)
        report()
        return code


def _report(error: Exception, code: int) -> None:
    """Prints why a command has failed, and notes the exit code."""
    if isinstance(error, ConfigError | DataError):
        print_problems(error)
    elif isinstance(error, TltError | OSError):
        print(printable(f"megatron-tlt: {type(error).__name__}: {error}"), file=sys.stderr)
    else:
        traceback.print_exception(error)
    note_exit(code)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Overrides may also stand behind options, where argparse alone takes none."""
    parser, words = _parser(), sys.argv[1:] if argv is None else argv
    if (word := next(filter(_SETTING.match, words), None)) is not None:
        name, _, value = word[2:].partition("=")
        message = f"megatron-tlt: {word}: settings are written {name}={value or 'VALUE'}, without --\n"
        parser.exit(BAD_INPUT, message if detect_launch().rank in (0, None) else None)
    args, rest = parser.parse_known_args(argv)
    if rest:
        from megatron_tlt.config.load import is_file

        strays = [word for word in rest if word.startswith("-") or not ("=" in word or is_file(word))]
        if "overrides" not in args or strays:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        args.overrides = [*args.overrides, *rest]
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-tlt", description=_ABOUT, epilog=_EXIT_CODES)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add_command in _COMMANDS:
        add_command(commands)
    return parser
