"""Gains and costs of training the drafter in idle time: whole runs of the quickstart, side by side.

    python benchmarks/bench_idle.py [--quick] [--parts windows interference keepup e2e tail pull] --out r.json

- windows: one run. Seconds trained over seconds idle, milliseconds from the last rank's end to all stopped, the share
  of a step that merging the replicas and publishing the drafter take.
- interference: rank 0 generates responses to the same prompts again and again, while rank 1 waits, or trains (A B A B).
- keepup: accepted length by step, always drafting 5 tokens, of drafters frozen and trained (`idle_keepup.py`), on a
  workload of its own (`keepup.yaml`). Writes a picture beside the JSON.
- e2e: everything on against no drafter at all, same seeds (A B A B): seconds per step, and the same final weights.
- tail: the same for a policy that does not fit the cache, with few and uneven responses (`tail.yaml`).
- pull: `rollout.schedule` pull and static, no drafter, engines with room for a few of their requests (A B A B).

Ranks are bound to cores where there are enough. Every run is a process of its own; `--work` keeps them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from lib import idle_keepup
from lib import training_runs as runs
from lib.bench_record import ROOT, write_record
from lib.training_runs import Rows, launch

sys.path.insert(0, str(ROOT))
SPEC = "rollout.speculation"
DRAFTER = ROOT / "assets/demo-drafter"
ON = [f"{SPEC}.drafter=eagle", f"{SPEC}.drafter_path={DRAFTER}", "idle.train_drafter=true", "idle.pre_rollout=false"]
OFF = [f"{SPEC}.drafter=none", "idle.train_drafter=false", "idle.pre_rollout=false"]
TAIL = ROOT / "benchmarks/lib/tail.yaml"
PULL_RUNNING = (8, 32)  # of 128 requests of a rank
TAIL_MLP = 4096  # units of the wider policy's MLPs: 77 MB of weights, more than a core's share of any cache


def train(
    args: argparse.Namespace,
    name: str,
    steps: int,
    options: list[str],
    *,
    every: int = 0,
    config: Path | None = None,
    skip: int = 1,
) -> Rows:
    """A run of `steps` steps into `args.work`/NAME; its rows of metrics, the first (cold caches) left out."""
    rows = runs.train(
        args.work / name, config or args.config, steps, args.ranks, [*args.options, *options], every=every
    )
    return rows[skip:]


def windows(args: argparse.Namespace) -> tuple[Rows, dict[str, float]]:
    """One run with everything on."""
    rows = train(args, "windows", args.steps, ON)
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


def keepup(args: argparse.Namespace) -> tuple[Rows, dict[str, float]]:
    """Accepted length by RL step of four drafters (`idle_keepup.py`)."""

    def run(args: argparse.Namespace, name: str, steps: int, options: list[str]) -> Rows:
        return train(args, name, steps, options, config=idle_keepup.WORKLOAD, skip=0)

    return idle_keepup.keepup(args, run, launch)


def e2e(args: argparse.Namespace) -> tuple[Rows, dict[str, float]]:
    """Seconds per step with everything on and off; the weights must be the same."""
    rows, ratios = compare(args, "e2e", ON, OFF)
    return rows, {"e2e": ratios["step"], "rollout": ratios["rollout"], "identical": 1.0}


def tail(args: argparse.Namespace) -> tuple[Rows, dict[str, float]]:
    """As e2e, with a policy that does not fit the cache and few, uneven responses: decoding is bound by memory."""
    from lib.larger_policy import widen, widen_drafter

    from megatron_tlt.models.config import ModelConfig

    small = ROOT / "assets/demo-policy"
    model = widen(small, TAIL_MLP, args.work / "tail-policy")
    shapes = (ModelConfig.from_hf(path) for path in (small, model))
    drafter = widen_drafter(DRAFTER, *shapes, args.work / "tail-drafter")
    where = [f"model.path={model}"]
    on = [*ON, *where, f"{SPEC}.drafter_path={drafter}"]
    rows, ratios = compare(args, "tail", on, [*OFF, *where], TAIL)
    return rows, {"tail": ratios["step"], "tail_rollout": ratios["rollout"], "tail_identical": 1.0}


def pull(args: argparse.Namespace) -> tuple[Rows, dict[str, float]]:
    """Rollout and idle time with prompts fetched and dealt out, a few requests running at once; the same weights."""
    rows, summary = [], {}
    for running in PULL_RUNNING:
        few = [*OFF, f"rollout.max_running_requests={running}"]
        some, ratios = compare(args, f"pull-{running}", few, [*few, "rollout.schedule=static"])
        rows += [{**row, "running": running} for row in some]
        summary |= {f"pull_{name}_{running}": ratio for name, ratio in ratios.items()}
    return rows, summary


def compare(
    args: argparse.Namespace,
    part: str,
    on: list[str],
    off: list[str],
    config: Path | None = None,
) -> tuple[Rows, dict[str, float]]:
    """Runs with `on` and `off` in turns: rows, and median ratios off / on of a step and of rollout with idle time.

    Ends the benchmark if the final weights differ.
    """
    from tests.helpers.runs import checkpoint_tensors

    steps = args.steps
    kept, ratios, shares = [], [], []
    for turn in range(args.repeats):
        seconds, rollout, tensors = {}, {}, {}
        order = [("on", on), ("off", off)]
        for name, options in order if turn % 2 == 0 else order[::-1]:
            rows = train(args, f"{part}-{name}", steps, options, every=steps, config=config)
            seconds[name] = sum(row["time/step"] for row in rows)
            rollout[name] = sum(row["time/rollout"] + row["time/idle"] for row in rows)
            tensors[name] = checkpoint_tensors(args.work / f"{part}-{name}/checkpoints/step-{steps:06d}")
        if not all(bool((tensors["off"][k] == v).all()) for k, v in tensors["on"].items()):
            raise SystemExit(f"{part}: the final weights differ")
        ratios.append(seconds["off"] / seconds["on"])
        shares.append(rollout["off"] / rollout["on"])
        times = {"on_s": seconds["on"], "off_s": seconds["off"], "rollout": shares[-1]}
        kept.append({"part": part, **times, "rollout_off_s": rollout["off"]})
    return kept, {"step": statistics.median(ratios), "rollout": statistics.median(shares)}


PARTS = {part.__name__: part for part in (windows, interference, keepup, e2e, tail, pull)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 steps, 4 of keepup, one repeat")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--config", type=Path, default=ROOT / "configs/quickstart.yaml")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--keepup-steps", type=int, default=41)
    names = list(idle_keepup.COLORS)
    parser.add_argument("--curves", nargs="+", choices=names, default=names, help="of keepup")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, help="folder for the runs; by default a temporary one")
    parser.add_argument("--options", nargs="*", default=[], help="overrides for all runs")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.quick:
        args.steps, args.keepup_steps, args.repeats = 3, 4, 1
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
