"""`megatron-tlt watch RUN_DIR`: the last steps of a run and what its ranks do, on the terminal. Starts no ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.exit_codes import OK
from megatron_tlt.resilience.status import read_status, render

if TYPE_CHECKING:
    import argparse

    from rich.console import RenderableType

_STEPS, _RANKS = 8, 16  # rows of the two tables
_EVERY_S = 2.0  # between two views


def add_watch(commands: Any) -> None:
    """Adds the command to the parser."""
    text = "show a run in progress on the terminal"
    watch = commands.add_parser("watch", help=text, description=text)
    watch.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    watch.add_argument("--once", action="store_true", help="print the present state and leave")
    watch.set_defaults(run=_watch)


def _watch(args: argparse.Namespace) -> int:
    """Until the run has ended, or Ctrl-C. Raises ConfigError where there is no run."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    shown, is_over = view(args.run_dir)
    if args.once:
        console.print(shown)
        return OK
    try:
        with Live(shown, console=console, auto_refresh=False) as live:
            while not is_over:
                time.sleep(_EVERY_S)
                shown, is_over = view(args.run_dir)
                live.update(shown, refresh=True)
    except KeyboardInterrupt:
        console.print("(the run continues)")
    return OK


def view(run_dir: Path) -> tuple[RenderableType, bool]:
    """Evaluations, the last steps, and `megatron-tlt status` of the worst ranks; whether the run has ended."""
    from rich.console import Group
    from rich.text import Text

    from megatron_tlt.observe.progress import steps_table
    from megatron_tlt.observe.runfiles import read_run

    run = read_run(run_dir, with_responses=False)
    status = read_status(run_dir)
    parts: list[RenderableType] = []
    if run.evals:
        values = "  ".join(f"{row['step']}: {row.get('eval/pass@1') or 0:.3f}" for row in run.evals[-6:])
        parts.append(Text(f"held-out accuracy after step  {values}"))
    if run.steps:
        parts.append(steps_table({row["step"]: row for row in run.steps[-_STEPS:]}))
    ranks = render(run_dir, status, _RANKS, hint=f"megatron-tlt status --all {run_dir}")
    headline, _, table = ranks.partition("\n")  # the headline begins with a path, of any length
    parts += [Text(headline), Text(table, no_wrap=True, overflow="crop")]
    is_over = status.condition != "running" if status.rows else run.is_finished
    return Group(*parts), is_over
