"""Jobs of two ranks that must have the same responses and gradients with a way of computing on and off.

lora   adapters, two optimizer steps a step: gathers of parameters that overlap the forward, against none
idle   pre-rollouts, which are verified like any draft

Each rank needs a GPU of its own: with one GPU this part says so and runs nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.check import Check
from benchmarks.gpu.exact import changes
from benchmarks.gpu.result import Result
from benchmarks.gpu.rl import launch, merged, phases, read

RANKS = 2
LORA: dict[str, Any] = {"actor": {"lora": {"rank": 8}}, "algorithm": {"mini_batches": 2}}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "lora": (LORA, {"actor": {"overlap": "off"}}, {"actor": {"overlap": "on"}}),
    "idle": ({}, {"idle": {"pre_rollout": False}}, {"idle": {"pre_rollout": True}}),
}


def run(check: Check, found: Result) -> None:
    """Both pairs."""
    if check.is_cuda and torch.cuda.device_count() < RANKS:
        found.note({"skipped": f"{RANKS} GPUs are needed, {torch.cuda.device_count()} is visible"})
        return
    steps = 2 if check.smoke else 3
    for name, (common, off, on) in PAIRS.items():
        same = []
        for mode, own in (("off", off), ("on", on)):
            folder = check.work / f"pairs-{name}-{mode}"
            launch(check, folder, steps, merged(merged(changes(check, check.dtype_name), common), own), RANKS)
            rows = read(folder)
            found.add_row({"pair": name, "mode": mode, **phases(rows)})
            same.append([(row["responses"], row["policy/grad_norm"]) for row in rows])
        pre_rolled = sum(row.get("pre_rollout/tokens", 0.0) for row in rows)
        found.note({f"{name}_same": float(same[0] == same[1]), f"{name}_pre_rolled": pre_rolled})
        if same[0] != same[1] or len(same[0]) != steps:
            found.fail(f"{name}: responses or gradients differ in {steps} steps, on against off")
