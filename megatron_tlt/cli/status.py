"""`megatron-tlt status RUN_DIR`: what every rank of a run does, the worst first. Needs no MPI and no GPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.errors import ConfigError
from megatron_tlt.resilience import status_files as files
from megatron_tlt.resilience import status_table as table

if TYPE_CHECKING:
    import argparse

EXIT_BROKEN, EXIT_UNKNOWN = 1, 2
_SHOWN = 32
_PATIENCE_S = 30.0


def add_status(commands: Any) -> None:
    """Adds the command to the parser."""
    text = "show what every rank of a run does, the worst first"
    about = f"{text}. Exit status: 0 running, finished, saved or ended, 1 crashed, hung or lost, 2 nothing is known."
    command = commands.add_parser("status", help=text, description=about)
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="train.run_dir of the run")
    command.add_argument("--json", action="store_true", help="as JSON, all ranks")
    command.add_argument("--all", action="store_true", help=f"all ranks, not the {_SHOWN} worst")
    command.add_argument(
        "--stacks", action="store_true", help="first have all ranks write their stacks; the run goes on"
    )
    command.set_defaults(run=_status)


def _status(args: argparse.Namespace) -> int:
    if not args.run_dir.is_dir():
        raise ConfigError.of("RUN_DIR", str(args.run_dir), "must be the directory of a run")
    if args.stacks:
        print(ask_for_stacks(args.run_dir), file=sys.stderr)
    status = table.read_status(args.run_dir)
    if args.json:
        print(json.dumps(table.as_json(status), indent=2))
    else:
        print(table.render(args.run_dir, status, 0 if args.all else _SHOWN))
    if status.condition == "unknown":
        return EXIT_UNKNOWN
    return EXIT_BROKEN if status.condition in ("crashed", "hung", "lost") else 0


def ask_for_stacks(run_dir: Path, patience_s: float = _PATIENCE_S) -> str:
    """Has the ranks of a running job append their stacks to RUN_DIR/stacks; waits for them. Returns what came of it."""
    rows = table.read_status(run_dir).rows
    live = [beat for beat, _ in rows if beat.is_running]
    if not live:
        return f"no rank of {run_dir} runs: nobody to ask for stacks"
    ask = files.Ask(live[0].attempt, f"ask-{time.time():.3f}")
    files.write_json(files.ask_path(run_dir), ask)
    end = time.monotonic() + max(patience_s, 3 * live[0].heartbeat_s)
    while True:
        beats, _ = files.read_beats(run_dir, ask.attempt)
        late = [b.rank for b in beats.values() if b.is_running and b.stacks != ask.id]
        if not late or time.monotonic() > end:
            break
        time.sleep(0.1)
    folder = files.stacks_path(run_dir, 0).parent
    lacking = f"; none came from rank {', '.join(map(str, late))}" if late else ""
    return f"stacks of {len(live) - len(late)} of {len(live)} running ranks are in {folder}{lacking}"
