"""Rollouts with tools that take 0, 0.1 and 1 second a call, TLT on and off: seconds a step, and use of the waiting.

    python benchmarks/bench_agents.py [--quick] [--latencies 0 0.1 1] --out r.json

For each latency whole runs of `lib/slow_tool.yaml` with a trained drafter and with none, same seeds, in turns
(A B B A), on two ranks with 64 trajectories each. The summary has `identical` (1: the same responses, rewards and
weights in all runs of all latencies) and for each latency, NAME_SECONDS:

    off, on       seconds of a step
    rollout, e2e  seconds of rollout with the wait for other ranks, and of a step, off / on; above 1: TLT is faster
    waiting       share of the ranks' time in which all trajectories of a rank wait for their tools, TLT on
    recovered     share of this waiting that trained the drafter
    decoding      share of the engine's steps that decode, all of which may draft; the others are prefill, TLT on
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from lib import on_off
from lib.bench_record import ROOT, write_record
from lib.training_runs import Rows, train

WORKLOAD = ROOT / "benchmarks/lib/slow_tool.yaml"
KEYS = ("steps", "prefill_steps", "turns", "given_tokens", "parked_seconds")


def job(args: argparse.Namespace, latency: float, mode: str) -> dict[str, Any]:
    """One run; the row of its steps but the first, whose caches are cold."""
    folder = args.work / f"{latency:g}-{mode}"
    options = [*(on_off.ON if mode == "on" else on_off.OFF), f"env.params.latency_s={latency}", *args.options]
    rows = train(folder, WORKLOAD, args.steps, args.ranks, options, every=args.steps)
    row = {"latency_s": latency, **on_off.job_row(mode, rows[1:], folder, args.steps)}
    for kept, step in zip(row["steps"], rows[1:], strict=True):
        kept |= {f"engine/{key}": step[f"engine/{key}"] for key in KEYS}
        kept["env/recovered_seconds"] = step.get("env/recovered_seconds", 0.0)
    return row


def figures(rows: Rows, ranks: int) -> dict[str, float]:
    """The summary of one latency's rows."""
    ratios = on_off.summarize(rows)
    of = {mode: [row for row in rows if row["mode"] == mode] for mode in ("off", "on")}
    steps = [step for row in of["on"] for step in row["steps"]]
    total = {key: sum(step[key] for step in steps) for key in steps[0]}
    waited = total["engine/parked_seconds"]
    found = {mode: statistics.mean(map(on_off.whole, some)) for mode, some in of.items()}
    found |= {key: ratios[key] for key in ("rollout", "e2e")}
    found["waiting"] = waited / (ranks * total["seconds"])
    found["decoding"] = 1.0 - total["engine/prefill_steps"] / total["engine/steps"]
    if waited:
        found["recovered"] = total["env/recovered_seconds"] / waited
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 steps, one run a side, latencies 0 and 0.1 s")
    parser.add_argument("--latencies", nargs="+", type=float, default=[0.0, 0.1, 1.0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--work", type=Path, help="folder for the runs; by default a temporary one")
    parser.add_argument("--options", nargs="*", default=[], help="overrides for all runs")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    order = ("on", "off", "off", "on")
    if args.quick:
        args.steps, args.latencies, order = 2, args.latencies[:2], order[:2]
    rows: Rows = []
    summary: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        args.work = args.work or Path(scratch)
        for latency in args.latencies:
            mine = [job(args, latency, mode) for mode in order]
            rows += mine
            print(on_off.table(mine, f"{latency:g} s a call"))
            found = figures(mine, args.ranks)
            summary |= {f"{name}_{latency:g}": value for name, value in found.items()}
            summary["identical"] = on_off.summarize(rows)["identical"]
            for name, value in (found | {"identical": summary["identical"]}).items():
                print(f"{name:28s} {value:10.3f}", flush=True)
            write_record(args.out, rows, summary)


if __name__ == "__main__":
    main()
