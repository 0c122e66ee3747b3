"""Runs with TLT on and off that must have the same responses in every step, by arithmetic: invariant numerics.

What they cost stands beside part `rl`: seconds of a step in the same recipe with default numerics. Both tables fill
the one of docs/design/numerics.md.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.check import Check
from benchmarks.gpu.result import Result
from benchmarks.gpu.rl import FIXED, Pair, judge

STEPS, SMOKE_STEPS = 3, 1


def run(check: Check, found: Result) -> None:
    """In bf16 on a GPU, and in float32."""
    steps = SMOKE_STEPS if check.smoke else STEPS
    for dtype in ("bf16", "fp32") if check.is_cuda else ("fp32",):
        judge(check, Pair(dtype, steps, changes(check, dtype), must_agree=True), found)


def changes(check: Check, dtype: str) -> dict[str, Any]:
    """Invariant numerics, drafts in every step, deterministic updates. In float32 half the tokens of a micro-batch."""
    invariant: dict[str, Any] = {
        "actor": {"dtype": dtype},
        "rollout": {"dtype": dtype, "numerics": "invariant", **FIXED},
        "train": {"deterministic": True, "prompts_per_step": 4},
    }
    if check.is_cuda:
        invariant["rollout"]["max_tokens"] = 64
        if dtype == "fp32":
            invariant["actor"]["micro_batch_tokens"] = 4096
    return invariant
