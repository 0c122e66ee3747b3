"""`megatron-tlt watch RUN_DIR`: the last steps of a run and its `status`, again and again. Starts no ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.exit_codes import OK
from megatron_tlt.resilience.status import read_status, status_text

if TYPE_CHECKING:
    import argparse

_STEPS = 8  # lines of steps
_RANKS = 16  # lines of ranks
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
    from rich.text import Text

    text, is_over = view(args.run_dir)
    is_over = is_over or args.once
    try:
        with Live(console=Console(), auto_refresh=False, transient=True) as live:
            while not is_over:
                live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)
                time.sleep(_EVERY_S)
                text, is_over = view(args.run_dir)
        print(text)
    except KeyboardInterrupt:
        print("(the run continues)")
    return OK


def view(run_dir: Path) -> tuple[str, bool]:
    """The last evaluation, the last steps, and `megatron-tlt status` of the worst ranks; whether the run has ended."""
    from megatron_tlt.observe.progress import step_line
    from megatron_tlt.observe.runfiles import read_end, require_run

    status = read_status(run_dir)
    if not status.rows:  # a run that has just started has no other files
        require_run(run_dir)
    run = read_end(run_dir, _STEPS)
    lines = [step_line(row["step"], run.num_steps, row) for row in run.steps]
    for row in run.evals:
        lines.append(f"held-out accuracy after step {row['step']}: {row.get('eval/pass@1') or 0:.3f}")
    lines.append(status_text(run_dir, status, _RANKS, hint=f"megatron-tlt status --all {run_dir}"))
    is_over = status.condition != "running" if status.rows else run.is_finished
    return "\n".join(lines), is_over
