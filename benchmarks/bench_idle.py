"""What training the drafter in idle time gives and costs: whole runs of the quickstart, side by side.

    python benchmarks/bench_idle.py [--quick] [--parts windows interference keepup e2e] [--ranks 2] --out r.json

- windows: one run. Seconds trained over seconds idle, milliseconds from the last rank's end to all stopped, the share
  of a step that merging the replicas and publishing the drafter take.
- interference: rank 0 answers the same prompts again and again, while rank 1 waits, or trains (A B A B).
- keepup: accepted length by step, always drafting 5 tokens, with a frozen drafter, with one that is trained, and with
  one that starts from random weights. Writes a picture beside the JSON.
- e2e: everything on against no drafter at all, same seeds (A B A B): seconds per step, and the same final weights.

Ranks are bound to cores where there are enough. Every run is a process of its own; `--work` keeps them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_record import ROOT, write_record

sys.path.insert(0, str(ROOT))
SPEC = "rollout.speculation"
DRAFTER = ROOT / "assets/demo-drafter"
ON = [f"{SPEC}.drafter=hybrid", f"{SPEC}.drafter_path={DRAFTER}", "idle.train_drafter=true"]
OFF = [f"{SPEC}.drafter=none", "idle.train_drafter=false"]
EAGLE = [f"{SPEC}.drafter=eagle", f"{SPEC}.selector=fixed", f"{SPEC}.draft_len=5"]
KEEPUP = {
    "frozen": [*EAGLE, f"{SPEC}.drafter_path={DRAFTER}", "idle.train_drafter=false"],
    "trained": [*EAGLE, f"{SPEC}.drafter_path={DRAFTER}", "idle.train_drafter=true"],
    "from random": [*EAGLE, f"{SPEC}.drafter_path=null", "idle.train_drafter=true"],
}
QUIET = ["checkpoint.resume=never", "eval.every=0", "observe.tensorboard=false", "observe.progress=none"]

Rows = list[dict[str, Any]]


def launch(ranks: int, command: list[str]) -> str:
    """Runs `command` on ranks of one thread each; its output. Ends the benchmark if it fails."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    bind = ["-bind-to", "core"] if ranks <= (os.cpu_count() or 1) else []
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    whole = [mpiexec, *bind, "-n", str(ranks), sys.executable, "-m", "mpi4py", *command]
    done = subprocess.run(whole, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(whole)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def train(args: argparse.Namespace, name: str, steps: int, options: list[str], every: int = 0) -> Rows:
    """A run of `steps` steps into `args.work`/NAME; its rows of metrics, the first one (cold caches) left out."""
    folder = args.work / name
    shutil.rmtree(folder, ignore_errors=True)
    overrides = [
        f"train.num_steps={steps}",
        f"train.run_dir={folder}",
        f"checkpoint.every={every}",
        f"cluster.ranks_per_node={args.ranks}",
        *QUIET,
        *args.options,
        *options,
    ]
    launch(args.ranks, ["-m", "megatron_tlt", "train", str(args.config), *overrides])
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if "time/step" in row][1:]


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
    """Rollout time of a busy rank beside one that trains over beside one that waits."""
    text = launch(2, [str(ROOT / "benchmarks/idle_worker.py"), str(args.config), str(args.repeats)])
    rows: Rows = [{"part": "interference", **row} for row in json.loads(text.splitlines()[-1])]
    ratios = [row["training_s"] / row["waiting_s"] for row in rows]
    return rows, {"interference": statistics.median(ratios)}


def keepup(args: argparse.Namespace) -> tuple[Rows, dict[str, float]]:
    """Accepted length by RL step of three drafters."""
    curves = {}
    for name, options in KEEPUP.items():
        rows = train(args, f"keepup-{name.replace(' ', '-')}", args.keepup_steps, options)
        curves[name] = [row["spec/accept_length"] for row in rows]
    kept = [{"part": "keepup", "drafter": name, "accept_length": curve} for name, curve in curves.items()]
    last = {name: statistics.mean(curve[-5:]) for name, curve in curves.items()}
    summary = {
        "accept_gain_vs_frozen": last["trained"] / last["frozen"],
        "random_start_share": last["from random"] / last["trained"],
    }
    tenth = curves["from random"][min(9, len(curves["from random"]) - 1)]
    summary["random_start_after_10"] = tenth / curves["frozen"][0]
    if args.out is not None:
        args.out.with_name(f"{args.out.stem}-keepup.svg").write_text(picture(curves))
    return kept, summary


def e2e(args: argparse.Namespace) -> tuple[Rows, dict[str, float]]:
    """Seconds per step with everything on and off; the weights must be the same."""
    from tests.helpers.runs import checkpoint_tensors

    kept, ratios, shares, identical = [], [], [], True
    for turn in range(args.repeats):
        seconds, rollout, tensors = {}, {}, {}
        order = [("on", ON), ("off", OFF)]
        for name, options in order if turn % 2 == 0 else order[::-1]:
            rows = train(args, f"e2e-{name}", args.steps, options, every=args.steps)
            seconds[name] = sum(row["time/step"] for row in rows)
            rollout[name] = sum(row["time/rollout"] + row["time/idle"] for row in rows)
            tensors[name] = checkpoint_tensors(args.work / f"e2e-{name}/checkpoints/step-{args.steps:06d}")
        identical &= all(bool((tensors["off"][k] == v).all()) for k, v in tensors["on"].items())
        ratios.append(seconds["off"] / seconds["on"])
        shares.append(rollout["off"] / rollout["on"])
        kept.append({"part": "e2e", "on_s": seconds["on"], "off_s": seconds["off"], "rollout": shares[-1]})
    if not identical:
        raise SystemExit("e2e: the final weights with everything on differ from those with everything off")
    return kept, {"e2e": statistics.median(ratios), "rollout": statistics.median(shares), "identical": 1.0}


def picture(curves: dict[str, list[float]]) -> str:
    """The curves as an SVG of 640 x 320."""
    top = max(max(curve) for curve in curves.values()) * 1.05
    colors, parts = ("#888888", "#1f77b4", "#d62728"), []
    for (name, curve), color in zip(curves.items(), colors, strict=True):
        points = [
            (50 + 560 * i / max(1, len(curve) - 1), 280 - 250 * value / top) for i, value in enumerate(curve)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"/>')
        parts.append(
            f'<text x="610" y="{points[-1][1] - 4:.1f}" text-anchor="end" fill="{color}">{name}</text>'
        )
    for tick in range(int(top) + 1):
        y = 280 - 250 * tick / top
        parts.append(f'<line x1="50" x2="610" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="44" y="{y + 4:.1f}" text-anchor="end">{tick}</text>')
    steps = len(next(iter(curves.values()))) + 1
    parts.append(f'<text x="330" y="306" text-anchor="middle">RL steps 2 to {steps}: accepted length</text>')
    body = "\n".join(parts)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="320" font-family="sans-serif" font-size="12">\n'
        f'<rect width="640" height="320" fill="white"/>\n{body}\n</svg>\n'
    )


PARTS = {"windows": windows, "interference": interference, "keepup": keepup, "e2e": e2e}


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
