"""Gains and costs of training the drafter in idle time: whole runs of the quickstart. `proof.py` has seconds of a step.

    python benchmarks/bench_idle.py [--quick] [--parts windows interference] --out r.json

- windows: one run. Seconds trained over seconds idle, milliseconds from the last rank's end to all stopped, the share
  of a step that merging the replicas and publishing the drafter take.
- interference: rank 0 generates responses to the same prompts again and again, while rank 1 waits, or trains (A B A B).

Ranks are bound to cores where there are enough. Every run is a process of its own; `--work` keeps them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from lib.bench_record import ROOT, write_record
from lib.on_off import ON
from lib.training_runs import Rows, launch, train


def windows(args: argparse.Namespace) -> tuple[Rows, dict[str, float]]:
    """One run with everything on; its first step, with cold caches, is left out."""
    rows = train(args.work / "windows", args.config, args.steps, args.ranks, [*ON, *args.options])[1:]
    names = ("idle/seconds", "idle/recovered_seconds", "idle/stop_ms_max", "drafter/steps", "time/step")
    kept = [{"part": "windows", **{name: row.get(name) for name in names}} for row in rows]
    idle, recovered = (sum(row[name] for row in rows) for name in names[:2])
    stops = sorted(row["idle/stop_ms_max"] for row in rows if "idle/stop_ms_max" in row)
    merge = statistics.median(row["time/merge"] / row["time/step"] for row in rows)
    summary = {"recovered": recovered / idle, "merge_share": merge}
    if stops:
        summary["stop_ms_p99"] = stops[min(len(stops) - 1, int(0.99 * len(stops)))]
        summary["stop_ms_median"] = statistics.median(stops)
    return kept, summary


def interference(args: argparse.Namespace) -> tuple[Rows, dict[str, float]]:
    """Ratio of a busy rank's rollout time beside a training rank to that beside a waiting one."""
    text = launch(2, [str(ROOT / "benchmarks/lib/idle_worker.py"), str(args.config), str(args.repeats)])
    rows: Rows = [{"part": "interference", **row} for row in json.loads(text.splitlines()[-1])]
    ratios = [row["training_s"] / row["waiting_s"] for row in rows]
    return rows, {"interference": statistics.median(ratios)}


PARTS = {part.__name__: part for part in (windows, interference)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 steps, one repeat")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--config", type=Path, default=ROOT / "configs/quickstart.yaml")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, help="folder for the runs; by default a temporary one")
    parser.add_argument("--options", nargs="*", default=[], help="overrides for all runs")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.quick:
        args.steps, args.repeats = 3, 1
    rows: Rows = []
    summary: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        args.work = args.work or Path(scratch)
        for part in args.parts:
            found, figures = PARTS[part](args)
            rows += found
            summary |= figures
            for name, value in figures.items():
                print(f"{name:28s} {value:10.3f}", flush=True)
            write_record(args.out, rows, summary)


if __name__ == "__main__":
    main()
