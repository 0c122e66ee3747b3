"""Jobs of one workload with TLT on and off: their phases and steps as rows, their ratios, and the table of both.

A job's row: {"mode", "last_step", "phases" (mean seconds of a step), "steps" (see `step_row`), "responses",
"rewards", "weights" (digests)}. `ON` is the demo drafter, trained in idle time; `OFF` nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.bench_record import ROOT
from lib.training_runs import Rows, digests

from megatron_tlt.observe.runfiles import NOT_IN_STEP

SPEC = "rollout.speculation"
DRAFTER = ROOT / "assets/demo-drafter"
OFF = [str(ROOT / "configs/tlt-off.yaml")]
ON = [f"{SPEC}.drafter=eagle", f"{SPEC}.drafter_path={DRAFTER}", "idle.train_drafter=true", "idle.pre_rollout=false"]
MODES = ("on", "off", "drafter", "pre_rollouts", "suffix")
LEGEND = {
    "identical": "same responses, rewards, weights in all jobs (1: yes)",
    "rollout": "rollout and waiting, seconds off / on",
    "e2e": "whole step, seconds off / on",
    "e2e_limit": "whole step if rollouts with TLT took no time",
    "drafter_rollout": "rollout and waiting by the trained drafter alone",
    "drafter_e2e": "whole step by the trained drafter alone",
    "pre_rollouts_rollout": "rollout and waiting by pre-rollouts alone",
    "pre_rollouts_e2e": "whole step by pre-rollouts alone",
    "suffix_rollout": "rollout and waiting by the suffix drafter alone",
    "suffix_e2e": "whole step by the suffix drafter alone",
    "pre_rolled_accept": "tokens of a request in a step of a pre-rolled draft",
    "recovered": "share of idle seconds that trained or pre-rolled",
    "accept_length": "tokens of a request in a step in which it has a draft",
    "update_saved": "share of response tokens without a gradient",
}
STEP_KEYS = (
    "spec/accept_length",
    "idle/seconds",
    "idle/recovered_seconds",
    "update/skipped_share",
    "pre_rollout/seconds",
    "pre_rollout/tokens",
    "pre_rollout/drafted_share",
    "pre_rollout/accept_length",
    "length/median",
    "length/max",
    "reward/mean",
    "reward/equal_groups",
    "policy/entropy",
)
WAIT = ("rollout", "idle")  # their sum is the slowest rank's rollout, on every rank


def job_row(mode: str, timed: Rows, folder: Path, steps: int) -> dict[str, Any]:
    """The row of a job in `folder` whose timed steps gave these metrics; `steps`: of its last checkpoint."""
    row = {"mode": mode, "last_step": steps, "phases": phases(timed), "steps": [step_row(step) for step in timed]}
    return {**row, **digests(folder, steps)}


def phases(timed: Rows) -> dict[str, float]:
    """Mean seconds of a step by phase; the phases add up to the step."""
    names = {name.removeprefix("time/") for row in timed for name in row if name.startswith("time/")}
    names -= NOT_IN_STEP
    found = {name: statistics.mean(row.get(f"time/{name}", 0.0) for row in timed) for name in sorted(names)}
    rest = statistics.mean(row["time/step"] for row in timed) - sum(found.values())
    return {**found, "other": max(0.0, rest)}


def step_row(row: dict[str, Any]) -> dict[str, Any]:
    """What the record keeps of a step."""
    kept = {name: row[name] for name in STEP_KEYS if name in row}
    return {
        "step": row["step"],
        "seconds": row["time/step"],
        "rollout": sum(row[f"time/{name}"] for name in WAIT),
        "tokens": row["engine/generated_tokens"],
        **kept,
    }


def mean_phases(rows: Rows) -> dict[str, float]:
    """Phases over several jobs."""
    return {name: statistics.mean(row["phases"].get(name, 0.0) for row in rows) for name in rows[0]["phases"]}


def phases_by_mode(rows: Rows) -> dict[str, dict[str, float]]:
    """Mean phases of each mode that has jobs, in the order of `MODES`, over as many turns as there are with TLT off."""
    of = {mode: [row for row in rows if row["mode"] == mode] for mode in MODES}
    return {mode: mean_phases(jobs[: len(of["off"])]) for mode, jobs in of.items() if jobs}


def summarize(rows: Rows) -> dict[str, float]:
    """Ratios of one workload's jobs, those of on and off in pairs."""
    of = {mode: [row for row in rows if row["mode"] == mode] for mode in MODES}
    ends = {row["last_step"] for row in rows}
    by_end = [[row for row in rows if row["last_step"] == end] for end in ends]
    kinds = [len({row[key] for row in of_end}) for of_end in by_end for key in ("responses", "rewards", "weights")]
    figures = {"identical": float(max(kinds) == 1)}
    for mode in (mode for mode in MODES if mode != "off"):
        name = "" if mode == "on" else f"{mode}_"
        pairs = list(zip(of["off"], of[mode], strict=False))
        for key, total in (("rollout", waited), ("e2e", whole)):
            if pairs:
                figures[name + key] = statistics.median(total(off) / total(on) for off, on in pairs)
    on, off = (phases_by_mode(rows)[mode] for mode in ("on", "off"))
    figures["e2e_limit"] = sum(off.values()) / (sum(on.values()) - sum(on[name] for name in WAIT))
    steps = [step for row in of["on"] for step in row["steps"]]
    idle = sum(step["idle/seconds"] for step in steps)
    if idle > 0:
        used = sum(step["idle/recovered_seconds"] + step.get("pre_rollout/seconds", 0.0) for step in steps)
        figures["recovered"] = used / idle
    accepted = [step["spec/accept_length"] for step in steps if "spec/accept_length" in step]
    figures["accept_length"] = statistics.mean(accepted or [1.0])  # without a draft: the policy's own token
    if pre_rolled := [step["pre_rollout/accept_length"] for step in steps if "pre_rollout/accept_length" in step]:
        figures["pre_rolled_accept"] = statistics.mean(pre_rolled)
    figures["update_saved"] = statistics.mean(step["update/skipped_share"] for step in steps)
    return figures


def waited(row: dict[str, Any]) -> float:
    """Seconds of a step until the slowest rank's last response."""
    return sum(row["phases"][name] for name in WAIT)


def whole(row: dict[str, Any]) -> float:
    """Seconds of a step."""
    return float(sum(row["phases"].values()))


def table(rows: Rows, title: str) -> str:
    """Seconds of a step by phase, a column a mode."""
    means = phases_by_mode(rows)
    names = sorted(means["off"], key=lambda name: -means["off"][name])
    lines = [f"\n{title}: seconds of a step", f"{'':12s}" + "".join(f"{m:>13s}" for m in means)]
    lines += [f"{name:12s}" + "".join(f"{means[m].get(name, 0.0):13.2f}" for m in means) for name in names]
    lines.append(f"{'step':12s}" + "".join(f"{sum(means[m].values()):13.2f}" for m in means))
    for mode in means:
        row = next(row for row in rows if row["mode"] == mode)
        cells = [
            f"{s['rollout']:.1f} s, trained {s['idle/recovered_seconds']:.1f} and pre-rolled "
            f"{s.get('pre_rollout/seconds', 0.0):.1f} of {s['idle/seconds']:.1f} idle s, "
            f"accepted {s.get('spec/accept_length', 1.0):.2f}"
            for s in row["steps"]
        ]
        lines.append(f"{mode}, rollouts by step: " + "; ".join(cells))
    return "\n".join(lines)


def judge(figures: Mapping[str, float], goals: Mapping[str, float], legend: Mapping[str, str] = LEGEND) -> list[str]:
    """A line for each figure with what it means; those with a goal: met or missed."""
    lines = []
    for name, value in figures.items():
        goal = goals.get(name)
        mark = "" if goal is None else f"  goal {goal:g}: {'met' if value >= goal else 'MISSED'}"
        lines.append(f"{legend[name]:52s}{value:8.3f}{mark}")
    return lines
