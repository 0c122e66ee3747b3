"""The result of a simulation, and its form as one JSON document. Torch-free.

    {"schema": "megatron-tlt/simulation/1", "name", "config": {..}, "assumptions": ["..."],
     "points": [Point], "comparisons": [Comparison]}

A point is one way of running (`mode`) on one number of nodes. All times are seconds of virtual time, GPU-times are
seconds summed over GPUs. `to_json` writes every field of the classes below under its own name.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = "megatron-tlt/simulation/1"
SIM_PHASES = ("rollout", "stop", "score", "logprobs", "update", "merge", "weight_sync", "other")
"""In order. rollout: until the slowest replica is done; stop: until every rank knows, training and pre-rollouts have
stopped, and every rank has these."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One RL step."""

    step: int
    seconds: float
    phases: dict[str, float]
    """Seconds by phase (`SIM_PHASES`); they add up to `seconds`."""
    tokens: int
    """Tokens of all responses."""
    accept_length: float
    """Mean tokens of a request in an engine step that drafted; 0: none did."""
    idle_gpu_seconds: float
    """GPU-seconds of replicas that waited for slower ones, those trained or pre-rolled in included."""
    recovered_gpu_seconds: float
    """Of these, inside micro-steps of drafter training."""
    pre_rolling_gpu_seconds: float
    """Of these, in pre-rollouts."""
    matching: float
    """Share of `tokens` that were pre-rolled and stand before their response's first mismatch."""
    micro_steps: int
    """Of drafter training, over all replicas."""
    quality: float
    """The drafter's at the step's start: 0 never adapted to this policy, 1 adapted to it."""
    preemptions: int = 0
    """Requests that lost their KV cache and were computed again."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """The production selector's choices and speed at one number of running requests of a replica."""

    running: int
    shares: dict[str, float]
    """Share of engine steps by `DraftStrategy.name`."""
    tokens_per_second: float
    """Of the replica."""
    plain_tokens_per_second: float
    """The same without drafts."""
    accept_length: float
    """Mean tokens of a request in an engine step that drafted; 0: none did."""


@dataclass(frozen=True, slots=True)
class Point:
    """One mode on one number of nodes."""

    mode: str
    nodes: int
    gpus: int
    replicas: int
    seconds: float
    """Mean of a step."""
    phases: dict[str, float]
    """Mean seconds by phase."""
    tokens_per_second: float
    """Responses' tokens of all GPUs, per second of the whole step."""
    idle_gpu_hours: float
    """Of all simulated steps."""
    recovered_gpu_hours: float
    pre_rolling_gpu_hours: float
    gpu_hours: float
    """Of all simulated steps, busy or not."""
    accept_length: float
    matching: float
    """Of all steps, as in `StepRecord`."""
    steps: list[StepRecord]
    running: list[tuple[float, int]]
    """Of the last step: (seconds since the rollout's start, running requests of all replicas)."""
    strategies: list[Strategy]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A mode against the first one on the same nodes: times as fast."""

    nodes: int
    mode: str
    baseline: str
    e2e: float
    rollout: float
    gpu_hours_saved_per_100_steps: float


@dataclass(frozen=True, slots=True)
class SimResult:
    """The whole document."""

    name: str
    config: dict[str, Any]
    assumptions: list[str]
    points: list[Point]
    comparisons: list[Comparison] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The document as maps and lists."""
        return {"schema": SCHEMA, **asdict(self)}

    def write(self, path: Path) -> None:
        """Writes `to_json` to `path`, making its directory."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
