"""`megatron-tlt report`, `timeline` and `watch`: looking at a run's directory. They start no ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.errors import ConfigError

if TYPE_CHECKING:
    import argparse


def add_report(commands: Any) -> None:
    """Adds the three commands to the parser."""
    text = "write a run's report, or the comparison of two runs, as one HTML file"
    report = commands.add_parser("report", help=text, description=text)
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="one run, or two to compare")
    report.add_argument("-o", "--out", type=Path, default=Path("report.html"), help="default: report.html")
    report.set_defaults(run=_report)
    text = "write what every rank did as a trace for ui.perfetto.dev or chrome://tracing"
    timeline = commands.add_parser("timeline", help=text, description=text)
    timeline.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    timeline.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("trace.json.gz"),
        help="default: trace.json.gz; .json: not compressed",
    )
    timeline.add_argument("--steps", metavar="FIRST-LAST", help="only these steps, from 1 (default: all)")
    timeline.add_argument("--ranks", metavar="A-B,C", help="only these ranks (default: all)")
    timeline.set_defaults(run=_timeline)
    text = "show a run on the terminal while it goes on"
    watch = commands.add_parser("watch", help=text, description=text)
    watch.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    watch.add_argument("--once", action="store_true", help="print the present state and leave")
    watch.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="between two looks (default: 1)"
    )
    watch.set_defaults(run=_watch)


def _report(args: argparse.Namespace) -> int:
    from megatron_tlt.observe.report import run_page
    from megatron_tlt.observe.report_compare import compare_page

    if len(args.runs) > 2:
        raise ConfigError.of("RUN_DIR", [str(run) for run in args.runs], "must be one run, or two to compare")
    page = run_page(args.runs[0]) if len(args.runs) == 1 else compare_page(*args.runs)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page.html(), encoding="utf-8")
    if page.verdict:
        print(page.verdict)
    print(f"wrote {args.out} ({args.out.stat().st_size / 1e6:.1f} MB)", flush=True)
    return 0


def _timeline(args: argparse.Namespace) -> int:
    from megatron_tlt.observe.timeline import write_timeline

    steps, ranks = (_numbers(name, getattr(args, name)) for name in ("steps", "ranks"))
    count = write_timeline(args.run_dir, args.out, steps, ranks)
    print(
        f"wrote {args.out}: {count} events (open it in https://ui.perfetto.dev or chrome://tracing)",
        flush=True,
    )
    return 0


def _numbers(name: str, text: str | None) -> set[int] | None:
    """ "1-3,7" as numbers; None: all. Raises ConfigError."""
    if text is None:
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigError.of(f"--{name}", text, "must be numbers and ranges of them, such as 1-3,7")
        chosen.update(range(int(first), int(last or first) + 1))
    return chosen


def _watch(args: argparse.Namespace) -> int:
    from megatron_tlt.observe.live import watch

    if not 0 < args.every < math.inf:
        raise ConfigError.of("--every", args.every, "must be a number of seconds above 0")
    watch(args.run_dir, once=args.once, every=args.every)
    return 0
