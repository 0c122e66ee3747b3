"""Steps of the one-GPU recipe on random weights, with TLT on and off: the same responses, and the cost of a step.

Each run is a job of its own, `megatron_tlt train` on one rank. Random weights accept few drafts, so the ratio of
steps says what TLT costs where it cannot help; part `speculation` says what it gives. In the recipe's bf16 the shape
of a forward rounds, and responses part now and then: `flips_per_token` says how often. Part `exact` has the pairs of
runs that must not part on a GPU; on a CPU every pair must have the same responses.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import ROOT, Check
from benchmarks.gpu.result import Result, Row
from megatron_tlt.config.data import PromptSourceConfig

OFF = {"rollout": {"speculation": {"drafter": "none"}}, "idle": {"train_drafter": False}}
# Always drafts, so that agreement is no accident.
FIXED = {"speculation": {"selector": "fixed", "draft_len": 4}}
PROMPTS, SAMPLES = 8, 8
WORDS = ("sort", "add", "reverse", "count")
LAST_LINES = 4  # of a job that failed, in the table
PHASES = ("rollout", "idle", "update", "merge", "weight_sync")


@dataclass(frozen=True)
class Pair:
    """Two runs that differ in TLT only."""

    name: str
    steps: int
    changes: dict[str, Any]
    must_agree: bool


def run(check: Check, found: Result) -> None:
    """The recipe as it is."""
    judge(check, Pair("recipe", 2 if check.smoke else 10, {}, must_agree=not check.is_cuda), found)


def judge(check: Check, pair: Pair, found: Result) -> None:
    """Runs a pair. Mutates `found`."""
    rows = {}
    for mode, changes in (("off", OFF), ("on", {})):
        folder = check.work / f"rl-{pair.name}-{mode}"
        launch(check, folder, pair.steps, merged(pair.changes, changes))
        rows[mode] = read(folder)
        found.add_row({"pair": pair.name, "mode": mode, **phases(rows[mode])})
    same = [a["responses"] == b["responses"] for a, b in zip(rows["off"], rows["on"], strict=True)]
    on, off = (found.rows[-1]["step_s"], found.rows[-2]["step_s"])
    prefix = "" if pair.name == "recipe" else f"{pair.name}_"
    found.note({f"{prefix}same_responses": same_share(rows), f"{prefix}off_over_on": off / on})
    found.note({f"{prefix}flips_per_token": flips_per_token(rows)})
    found.note({f"{prefix}step_s_on": on, f"{prefix}step_s_off": off})
    trained = sum(row.get("drafter/steps", 0.0) for row in rows["on"])
    found.note({f"{prefix}accept_length": rows["on"][-1].get("spec/accept_length", 0.0)})
    found.note({f"{prefix}drafter_steps": trained})
    if len(same) != pair.steps:
        found.fail(f"{pair.name}: {len(same)} of {pair.steps} steps are in the metrics")
    if pair.must_agree and not all(same):
        found.fail(f"{pair.name}: responses differ with TLT in step {same.index(False) + 1}")
    norms = [[row.get("policy/grad_norm") for row in rows[mode]] for mode in ("off", "on")]
    if pair.must_agree and norms[0] != norms[1]:
        found.fail(f"{pair.name}: gradients differ with TLT: their norms are {norms[0]} and {norms[1]}")
    if not trained:
        found.fail(f"{pair.name}: the drafter was not trained")
    if not any(row.get("policy/grad_norm", 0.0) > 0 for row in rows["on"]):
        found.fail(f"{pair.name}: no update had a gradient")


def same_share(rows: dict[str, list[Row]]) -> float:
    """Share of the responses that both runs gave word for word."""
    off, on = ([text for row in rows[mode] for text in row["texts"]] for mode in ("off", "on"))
    return sum(a == b for a, b in zip(off, on, strict=True)) / len(off)


def flips_per_token(rows: dict[str, list[Row]]) -> float:
    """How often a token differs where all before it were the same: differing responses over the tokens generated."""
    off, on = ([text for row in rows[mode] for text in row["texts"]] for mode in ("off", "on"))
    differing = sum(a != b for a, b in zip(off, on, strict=True))
    return differing / sum(row["engine/generated_tokens"] for row in rows["off"])


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """`second` over `first`, section by section."""
    joined = dict(first)
    for name, value in second.items():
        known = joined.get(name)
        joined[name] = merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return joined


def launch(check: Check, folder: Path, steps: int, changes: dict[str, Any], ranks: int = 1) -> None:
    """One job. Raises RuntimeError with its last lines if it fails."""
    folder = folder.resolve()  # paths in a file count from it
    folder.mkdir(parents=True)
    lines = [{"prompt": f"{WORDS[i % 4]} {i} {i * 7 % 13} {i * 3 % 11}", "answer": str(i)} for i in range(256)]
    for name in ("train", "eval"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = folder / "run.yaml"
    config.write_text(json.dumps(merged(settings(check, folder, steps), changes)))  # JSON is YAML
    threads = os.environ.get("OMP_NUM_THREADS", "1" if not check.is_cuda else "4")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": threads}
    command = [sys.executable, "-m", "megatron_tlt", "train", str(config)]
    if ranks > 1:
        command = [str(ROOT / "launch/local.sh"), "-n", str(ranks), str(config)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, flush=True)  # into the part's log
    shutil.rmtree(folder / "run/checkpoints", ignore_errors=True)  # of the last step: 14 bytes a parameter
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-LAST_LINES:]
        raise RuntimeError(f"train ended with {done.returncode}: {' | '.join(last)}")


def settings(check: Check, folder: Path, steps: int) -> dict[str, Any]:
    """The recipe, shortened: few responses, prompts and a reward that need nothing, no checkpoint but the last."""
    tree: dict[str, Any] = {
        "defaults": [str(check.recipe.resolve())],
        "model": {"path": str(check.random_policy().resolve()), "architecture": None},
        "rollout": {"samples_per_prompt": SAMPLES, "max_tokens": 256},
        "data": {name: prompts_in(folder / f"{name}.jsonl") for name in ("train", "eval")},
        "rewards": {
            "workers": 1,
            "functions": [{"name": "python", "path": f"{ROOT}/benchmarks/gpu/rewards.py:reward"}],
        },
        "train": {"num_steps": steps, "prompts_per_step": PROMPTS, "run_dir": str(folder / "run")},
        "eval": {"every": 0},
        "checkpoint": {"every": 0, "resume": "never"},
        "observe": {"tensorboard": False, "progress": "none", "samples_per_step": SAMPLES * PROMPTS},
    }
    if check.is_cuda:  # the GPU that is here has its own size
        return tree | {"cluster": {"memory_gib": None}}
    small = {
        "actor": {"dtype": "fp32", "micro_batch_tokens": 512, "recompute": "none"},
        "rollout": {"dtype": "fp32", "max_tokens": 24, "samples_per_prompt": 4, "max_running_requests": 8, **FIXED},
        "model": {"max_context": 256},
        "data": {"max_prompt_tokens": 128},
        "drafter": {
            "dtype": "fp32",
            "max_sequence_tokens": 64,
            "online": {"micro_step_tokens": 64, "buffer_mib": 16, "share_mib": 4},
        },
        "train": {"prompts_per_step": 4},
        "distributed": {"device": "cpu"},
        "cluster": {"memory_gib": 4},
    }
    return merged(tree, small)


def prompts_in(path: Path) -> dict[str, Any]:
    """A source of prompts with the settings of none that the recipe has."""
    return PromptSourceConfig(kind="jsonl", path=str(path)).model_dump(mode="json")


def read(folder: Path) -> list[Row]:
    """The steps of a job, with their digests."""
    run_dir = folder / "run"
    metrics = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    digests = map(json.loads, (run_dir / "rollouts.jsonl").read_text().splitlines())
    steps = [row for row in metrics if "time/step" in row]
    texts: dict[int, dict[tuple[int, int], str]] = {}
    for line in map(json.loads, (run_dir / "samples.jsonl").read_text().splitlines()):
        texts.setdefault(line["step"], {})[line["prompt_id"], line["sample_index"]] = line["response"]
    return [
        {**step, "responses": digest["responses"], "texts": [text for _, text in sorted(texts[step["step"]].items())]}
        for step, digest in zip(steps, digests, strict=True)
    ]


def phases(rows: list[Row]) -> Row:
    """Medians of seconds by phase, without the first step, which captures and compiles."""
    timed = rows[1:] or rows
    found = {"step_s": statistics.median(row["time/step"] for row in timed)}
    for name in PHASES:
        found[f"{name}_s"] = statistics.median(row.get(f"time/{name}", 0.0) for row in timed)
    found["tokens"] = statistics.median(row["engine/generated_tokens"] for row in timed)
    return found
