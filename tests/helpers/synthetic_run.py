"""A run directory of any number of ranks, made up: the formats of `observe/`, written without a run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from megatron_tlt.observe.jsonl import to_line

START = 1_800_000_000.0
# Phases after the rollout, with their start and seconds.
UPDATE_PHASES = (("score", 0.0, 0.1), ("exchange", 0.1, 0.1), ("update", 0.2, 1.7), ("weight_sync", 1.9, 0.1))
SLOW_RANK = 7  # the slowest of every step, where there are so many ranks


def write_run(
    run_dir: Path,
    ranks: int = 2,
    steps: int = 4,
    num_steps: int | None = None,
    speculation: bool = True,
    idle_training: bool = True,
    evals: bool = True,
    samples: bool = True,
    curves: bool = True,
    pace: float = 1.0,
    responses: str = "a",
    turns: bool = False,
) -> Path:
    """Writes a run that has done `steps` of `num_steps`. `pace` stretches rollouts; `responses` goes into the
    digests; `turns`: with an environment."""
    draw = random.Random(ranks * 1000 + steps)
    (run_dir / "events").mkdir(parents=True)
    done = num_steps is None or steps >= num_steps
    config = {
        "model": {"path": "assets/demo-policy"},
        "algorithm": {"name": "grpo"},
        "rollout": {"speculation": {"drafter": "eagle" if speculation else "none"}, "max_tokens": 448},
        "idle": {"train_drafter": idle_training},
        "train": {"num_steps": num_steps or steps, "run_dir": str(run_dir)},
    }
    (run_dir / "config.json").write_text(json.dumps(config))
    metrics: list[dict[str, Any]] = []
    rollouts: list[dict[str, Any]] = []
    lines: list[list[str]] = [[_event(rank, None, "instant", "open", START)] for rank in range(ranks)]
    if evals:
        metrics.append(_evaluation(0, START, 0.5))
    now = START + 1.0
    for step in range(steps):
        busy = [pace * draw.uniform(1.0, 4.0) for _ in range(ranks)]
        if ranks > SLOW_RANK:
            busy[SLOW_RANK] = pace * 5.0
        longest = max(busy)
        for rank in range(ranks):
            _rank_step(lines[rank], rank, step, now, busy[rank], longest, idle_training, curves, speculation, draw)
            if turns:
                waits = {"kind": "state", "name": "WAITING", "dur": 0.2 * busy[rank]}
                lines[rank] += [_event(rank, step, ts=now + at * busy[rank], **waits) for at in (0.2, 0.6)]
        now += longest + 2.1
        metrics.append(_metrics(step + 1, now, busy, speculation, idle_training))
        if turns:
            metrics[-1] |= {"env/turns": 1.5, "env/parked_share": 0.4, "env/failures": 3.0}
        rollouts.append(_rollouts(step + 1, speculation, responses))
        now += 0.05
    if evals and done:
        metrics.append(_evaluation(steps, now, 0.7))
    _write(run_dir / "metrics.jsonl", map(to_line, metrics))
    _write(run_dir / "rollouts.jsonl", map(to_line, rollouts))
    for rank, rows in enumerate(lines):
        _write(run_dir / "events" / f"rank-{rank:05d}.jsonl", rows)
    if samples:
        _write(
            run_dir / "samples.jsonl",
            (to_line(row) for s in range(steps) for row in _samples(s + 1, speculation, turns)),
        )
    return run_dir


def _write(path: Path, lines: Any) -> None:
    path.write_text("".join(lines), encoding="utf-8")


def _event(rank: int, step: int | None, kind: str, name: str, ts: float, dur: float | None = None, **attrs: Any) -> str:
    row: dict[str, Any] = {"ts": round(ts, 6), "rank": rank, "step": step, "kind": kind, "name": name}
    if dur is not None:
        row["dur"] = round(dur, 6)
    return to_line(row | ({"attrs": attrs} if attrs else {}))


def _rank_step(
    out: list[str],
    rank: int,
    step: int,
    now: float,
    busy: float,
    longest: float,
    idle_training: bool,
    curves: bool,
    speculation: bool,
    draw: random.Random,
) -> None:
    def add(kind: str, name: str, at: float, dur: float | None = None, **attrs: Any) -> None:
        out.append(_event(rank, step, kind, name, now + at, dur, **attrs))

    add("span", "rollout", 0.0, busy)
    add("state", "BUSY", 0.0, busy)
    wait = longest - busy
    add("state", "IDLE", busy, 0.3 * wait if idle_training else wait)
    if idle_training:
        add("state", "TRAINING", busy + 0.3 * wait, 0.7 * wait)
    add("span", "idle", busy, wait)
    for name, at, dur in UPDATE_PHASES:
        add("span", name, longest + at, dur)
    if curves:
        points = [[round(1e3 * busy * i / 31), 64 - 2 * i if i < 31 else 0] for i in range(32)]
        attrs: dict[str, Any] = {"start": round(now, 3), "running": points}
        if speculation:
            attrs["drafting"] = [0.0] * 8 + [round(draw.uniform(0.7, 1.0), 2)] * 16
        add("instant", "curve", longest + 2.0, **attrs)


def _evaluation(step: int, at: float, value: float) -> dict[str, Any]:
    return {"step": step, "time": at, "eval/pass@1": value, "eval/stderr": 0.02, "eval/pass@2": value + 0.1}


def _metrics(step: int, at: float, busy: list[float], speculation: bool, idle_training: bool) -> dict[str, Any]:
    ranks, waits = len(busy), [max(busy) - seconds for seconds in busy]
    row: dict[str, Any] = {"step": step, "time": round(at, 3)}
    row |= {"reward/mean": 0.5 + 0.01 * step, "reward/accuracy": 0.4 + 0.01 * step}
    row |= {
        "length/mean": 70.0,
        "length/median": 50.0,
        "length/p95": 230.0,
        "length/max": 448.0,
        "length/truncated": 0.1,
    }
    row |= {f"time/{name}": seconds for name, _, seconds in UPDATE_PHASES}
    row |= {"time/rollout": sum(busy) / ranks, "time/idle": sum(waits) / ranks, "time/step": max(busy) + 2.1}
    row |= {"engine/tokens_per_s": 1000.0 * ranks, "engine/generated_tokens": 5000.0 * ranks}
    row |= {"idle/seconds": sum(waits)} | {f"idle/rank{rank:03d}": wait for rank, wait in enumerate(waits)}
    if idle_training:
        row |= {"idle/recovered_seconds": 0.7 * sum(waits), "drafter/steps": 40.0}
        row |= {"drafter/loss_mean": 0.3 + 0.4 / step, "drafter/accept/1_mean": 0.95 - 0.2 / step}
    if speculation:
        row |= {"spec/accept_length": 3.0 + 0.1 * step}
        row |= {"engine/spec_row_steps": 1000.0 * ranks, "engine/spec_emitted_tokens": 3500.0 * ranks}
    return row


def _rollouts(step: int, speculation: bool, responses: str) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "samples": 64}
    row |= {"responses": f"{responses}{step:015x}", "rewards": f"b{step:015x}"}
    if speculation:
        row |= {"strategies": {"none": 40, "suffix_11": 60 + step, "trained_5": 20}}
        row |= {"drafted_at": [100, 80, 60, 40], "accepted_at": [90, 60, 35, 20]}
        row |= {"by_batch": {"1": [50, 200], "2": [40, 130], "128": [200, 400]}}
    return row


def _samples(step: int, speculation: bool, turns: bool) -> list[dict[str, Any]]:
    same: dict[str, Any] = {"step": step, "prompt_id": step, "task": "sums", "prompt": "1 < 2 & 3?", "answer": "8"}
    same |= {"response": "2+6=8 <b>bold</b>", "tokens": 6, "finish_reason": "stop"}
    if speculation:
        pieces = ["2", "+", "6", "=", "8", " <b>bold</b>"]
        same["drafts"] = {"pieces": pieces, "runs": [[1, 2, "<i>7</i>"], [4, 2, ""]]}
    if turns:
        same |= {"given": [[3, 4]], "turn_rewards": [0.5], "env_failure": "timeout"}
        call = {"name": "add", "arguments": {"a": 2}}
        first = {"response": "2+6", "calls": [call, {"problem": "no JSON"}], "observation": "= "}
        same["turns"] = [first | {"reward": 0.5, "seconds": 0.25}, {"response": "8 <b>bold</b>", "seconds": 30.0}]
    pairs = ((0, True), (3, False))
    return [same | {"sample_index": i, "reward": float(right), "correct": right} for i, right in pairs]
