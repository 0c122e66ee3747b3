"""Compares the simulator with the measured quickstart and with published figures of TLT.

    python benchmarks/bench_sim.py --out benchmarks/results/simulation.md     # simulate, compare, print
    python benchmarks/bench_sim.py --measure 3                                # runs the quickstart anew

`--measure STEPS` runs the quickstart's first steps without drafts, with the suffix drafter and with its own, on 2
ranks, in CPU seconds of each rank's main thread (`lib/sim_worker.py`): other processes' load counts less. CPU time has
no waiting, so the drafter is not trained in idle time there. A step's seconds are the slowest rank's rollout, update
and other phases. It writes results/quickstart-measured.json, which `--out` and the tests read.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from lib.bench_record import ROOT, commit, machine
from lib.training_runs import QUIET, launch

sys.path.insert(0, str(ROOT))

MEASURED = ROOT / "benchmarks/results/quickstart-measured.json"
MODES = {"off": "none", "suffix": "suffix", "frozen": "eagle"}  # the quickstart's drafter
CONFIG = "configs/quickstart.yaml"
COMMON = [*QUIET, "idle.train_drafter=false", "idle.pre_rollout=false"]
COMMON += ["checkpoint.every=0", "distributed.timeout_s=3000"]


def measure(steps: int) -> dict[str, Any]:
    """Runs each mode on 2 ranks and reads the event logs."""
    modes = {}
    for mode, drafter in MODES.items():
        folder = Path(tempfile.mkdtemp(prefix="bench-sim-"))
        settings = [
            f"rollout.speculation.drafter={drafter}",
            f"train.num_steps={steps}",
            f"train.run_dir={folder}",
        ]
        started = time.time()
        launch(2, ["benchmarks/lib/sim_worker.py", "train", CONFIG, *COMMON, *settings])
        modes[mode] = {"steps": read_steps(folder), "settings": settings[:2]}
        print(f"{mode}: {time.time() - started:.0f} s of wall time", flush=True)
        shutil.rmtree(folder)
    return {
        "command": sys.argv,
        "commit": commit(),
        "machine": machine(),
        "config": CONFIG,
        "ranks": 2,
        "modes": modes,
    }


def read_steps(run_dir: Path) -> list[dict[str, float]]:
    """Seconds of each step by phase, those of the slowest rank in it; tokens; the whole step."""
    from megatron_tlt.observe.events import read_events

    phases: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for rank in range(2):
        for event in read_events(run_dir, rank):
            if event["kind"] == "span" and event["step"] is not None:
                phases[event["step"]][event["name"]][rank] += event["dur"]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = []
    for row in (r for r in rows if "length/mean" in r):
        step = phases[int(row["step"]) - 1]
        times = {name: max(of) for name, of in step.items() if name not in ("idle", "eval", "checkpoint")}
        entry = {name: round(seconds, 4) for name, seconds in times.items()}
        entry |= {"seconds": round(sum(times.values()), 4), "tokens": row["engine/generated_tokens"]}
        entry |= {name: row[f"length/{name}"] for name in ("mean", "median", "p95", "max")}
        found.append(entry | {"accept_length": round(row.get("spec/accept_length", 0.0), 3)})
    return found


def main() -> None:
    """Measures, or compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", type=int, metavar="STEPS", help="run the quickstart anew")
    parser.add_argument("--out", type=Path, help="write the comparison as Markdown")
    args = parser.parse_args()
    if args.measure:
        MEASURED.write_text(json.dumps(measure(args.measure), indent=1) + "\n", encoding="utf-8")
        print(f"wrote {MEASURED}")
        return
    from lib.sim_points import render_points, validate

    started = time.process_time()
    text = render_points(validate())
    print(text)
    if args.out is not None:
        heading = f"# The simulator against published and measured figures\n\nMade by `python {' '.join(sys.argv)}`.\n"
        args.out.write_text(f"{heading}\n```\n{text}\n```\n", encoding="utf-8")
        print(f"wrote {args.out} ({time.process_time() - started:.0f} CPU seconds)")


if __name__ == "__main__":
    main()
