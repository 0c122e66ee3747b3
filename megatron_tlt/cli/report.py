"""`megatron-tlt report` and `timeline`: looking at a run's directory. They start no ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.exit_codes import OK
from megatron_tlt.config.checks.files import output_file_problems
from megatron_tlt.errors import ConfigError, printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from megatron_tlt.observe.runfiles import RunData

TRACE = rb'\{"displayTimeUnit":"ms","traceEvents":'  # how a timeline begins, unpacked


def add_report(commands: Any) -> None:
    """Adds the two commands to the parser."""
    text = "write a run's report as one HTML file, or print the comparison of two runs"
    report = commands.add_parser("report", help=text, description=text)
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="one run, or two to compare")
    report.add_argument("-o", "--out", type=Path, help="of one run's page (default: report.html)")
    report.set_defaults(run=_report)
    text = "write what every rank did as a trace for ui.perfetto.dev or chrome://tracing"
    timeline = commands.add_parser("timeline", help=text, description=text)
    timeline.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    default = Path("trace.json.gz")
    text = f"written as gzip, whatever its name (default: {default})"
    timeline.add_argument("-o", "--out", type=Path, default=default, help=text)
    timeline.add_argument("--steps", metavar="FIRST-LAST", help="only these steps, from 1 (default: all)")
    timeline.set_defaults(run=_timeline)


def _report(args: argparse.Namespace) -> int:
    from megatron_tlt.observe.files import write_atomically
    from megatron_tlt.observe.page import page_begins
    from megatron_tlt.observe.report import run_page
    from megatron_tlt.observe.report_compare import comparison

    if len(args.runs) > 2:
        raise ConfigError.of("RUN_DIR", [str(run) for run in args.runs], "must be one run, or two to compare")
    if len(args.runs) == 2:
        if args.out is not None:
            raise ConfigError.of("--out", str(args.out), "is the page of one run: a comparison is printed")
        runs = [_read(run) for run in args.runs]
        _warn([warning for run in runs for warning in run.warnings])
        print(printable(comparison(*runs)), flush=True)
        return OK
    args.out = args.out or Path("report.html")
    if problems := output_file_problems("--out", args.out, page_begins()):
        raise ConfigError(problems)
    page = run_page(_read(args.runs[0]))
    write_atomically(args.out, [page.html()])
    _warn(page.warnings)
    if page.headline:
        print(page.headline)
    print(f"wrote {args.out} ({args.out.stat().st_size / 1e6:.1f} MB)", flush=True)
    return OK


def _read(run_dir: Path) -> RunData:
    """A run's files, with what its ranks' status files say of its end."""
    from megatron_tlt.observe.runfiles import read_run
    from megatron_tlt.resilience.status import read_status

    run, status = read_run(run_dir), read_status(run_dir)
    if status.rows:
        run.condition = status.condition
        run.reasons = [] if status.condition in ("running", "finished") else status.reasons
    return run


def _timeline(args: argparse.Namespace) -> int:
    from megatron_tlt.observe.runfiles import read_run
    from megatron_tlt.observe.timeline import write_timeline

    steps = _range(args.steps)
    if problems := output_file_problems("--out", args.out, TRACE):
        raise ConfigError(problems)
    run = read_run(args.run_dir, with_rollouts=False)
    count = write_timeline(run, args.out, steps)
    _warn(run.warnings)
    hint = "open it in https://ui.perfetto.dev or chrome://tracing"
    print(f"wrote {args.out}: {count} events ({hint})", flush=True)
    return OK


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(printable(f"megatron-tlt: {warning}"), file=sys.stderr, flush=True)


def _range(text: str | None) -> range | None:
    """ "3-5" or "4" as numbers; None: all. Raises ConfigError."""
    if text is None:
        return None
    first, dash, last = text.partition("-")
    last = last if dash else first
    if not first.isdecimal() or not last.isdecimal() or int(last) < int(first):
        raise ConfigError.of("--steps", text, "must look like 4 or 3-5")
    return range(int(first), int(last) + 1)
