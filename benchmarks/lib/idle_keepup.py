"""`bench_idle.py`'s part keepup: accepted length by RL step of four drafters, on the workload of `keepup.yaml`.

Responses never depend on the drafter, so that in one step the first two draft the same responses, and so do the last
two:

    frozen        warmed up on short sums only (`keepup-drafter.yaml`), and left so
    trained       the same file, trained in idle time
    from random   made from a layer of the policy, no file; trained in idle time
    warmed up     `assets/demo-drafter`, left so: what the one from random weights is measured against

The last two run for as many steps as are needed to see whether 10 are enough, of 64 prompts: a drafter that has
only the responses to 8 overfits to them (docs/design/decisions.md).
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from lib.bench_record import ROOT
from lib.on_off import DRAFTER, SPEC
from lib.training_runs import Rows, launch, train

WORKLOAD = ROOT / "benchmarks/lib/keepup.yaml"
WARMUP = ROOT / "benchmarks/lib/keepup-drafter.yaml"
RANDOM_OPTIONS = ["train.prompts_per_step=64"]
RANDOM_STEPS = 11  # the accepted length of the 11th step is that after 10 times of training
LAST = 5  # steps that the end of a curve is a mean of
GAIN, SHARE = 1.25, 0.9  # to reach: trained / frozen at the end; from random / warmed up after 10 steps
FROM_NOTHING, DEMO_START = "from random", "warmed up"
CURVES = ("frozen", "trained", FROM_NOTHING, DEMO_START)
KEPT = ("reward/accuracy", "length/mean", "idle/seconds", "idle/recovered_seconds", "drafter/steps", "time/step")


def keepup(args: argparse.Namespace) -> tuple[Rows, dict[str, Any]]:
    """Rows of all curves, and the summary with whether it reaches the targets."""
    drafter = args.work / "keepup-drafter"
    needs_it = "frozen" in args.curves or "trained" in args.curves
    if needs_it and not (drafter / "config.json").exists():
        warm = ["-m", "megatron_tlt", "drafter", "train", str(WARMUP), "--out", str(drafter)]
        launch(1, warm)
    short = min(args.keepup_steps, RANDOM_STEPS)
    curves: dict[str, Rows] = {}
    for name, path, trained, steps, more in (
        ("frozen", drafter, False, args.keepup_steps, []),
        ("trained", drafter, True, args.keepup_steps, []),
        (FROM_NOTHING, None, True, short, RANDOM_OPTIONS),
        (DEMO_START, DRAFTER, False, short, RANDOM_OPTIONS),
    ):
        if name not in args.curves:
            continue
        options = [*drafting_options(path, trained), *more, *args.options]
        curves[name] = train(args.work / f"keepup-{name.replace(' ', '-')}", WORKLOAD, steps, args.ranks, options)
    lengths = {name: [row["spec/accept_length"] for row in rows] for name, rows in curves.items()}
    return [_row(name, rows, lengths[name]) for name, rows in curves.items()], summary(curves, lengths)


def drafting_options(drafter: Path | None, trained: bool) -> list[str]:
    """Always drafts five tokens, with the drafter in `drafter` (None: made from a layer of the policy)."""
    fixed = [f"{SPEC}.drafter=eagle", f"{SPEC}.selector=fixed", f"{SPEC}.draft_len=5"]
    path = "null" if drafter is None else str(drafter)
    return [*fixed, f"{SPEC}.drafter_path={path}", f"idle.train_drafter={str(trained).lower()}"]


def _row(name: str, rows: Rows, lengths: list[float]) -> dict[str, Any]:
    kept = {key: [row.get(key) for row in rows] for key in KEPT}
    return {"part": "keepup", "drafter": name, "accept_length": lengths, **kept}


def summary(curves: dict[str, Rows], lengths: dict[str, list[float]]) -> dict[str, Any]:
    """The end of `trained` over that of `frozen`, `from random` over `warmed up` in its last step, what was idle: of
    the curves that there are.
    """
    last = {name: statistics.mean(curve[-LAST:]) for name, curve in lengths.items()}
    found: dict[str, Any] = {}
    if {"frozen", "trained"} <= curves.keys():
        gain = last["trained"] / last["frozen"]
        accuracy = [row["reward/accuracy"] for row in curves["trained"]]
        found |= {
            "accept_frozen": last["frozen"],
            "accept_trained": last["trained"],
            "accept_gain_vs_frozen": gain,
            "accept_gain_met": float(gain >= GAIN),
            "accuracy_first": statistics.mean(accuracy[:LAST]),
            "accuracy_last": statistics.mean(accuracy[-LAST:]),
        }
    if {FROM_NOTHING, DEMO_START} <= curves.keys():
        share = lengths[FROM_NOTHING][-1] / lengths[DEMO_START][-1]
        found |= {"random_start_share": share, "random_start_met": float(share >= SHARE)}
    trained = [name for name in ("trained", FROM_NOTHING) if name in curves]
    return found | {f"idle_per_step_{name}": _idle(curves[name]) for name in trained}


def _idle(rows: Rows) -> float:
    return statistics.mean(row["idle/seconds"] for row in rows)
