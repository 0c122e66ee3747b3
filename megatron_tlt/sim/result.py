"""The result of a simulation, and its form as one JSON document. Torch-free.

    {"schema": "megatron-tlt/simulation/2", "name", "config": {..}, "assumptions": ["..."],
     "points": [Point], "comparisons": [Comparison]}

A point is one way of running (`mode`) on one number of nodes. All times are seconds of virtual time, GPU-times are
seconds summed over GPUs. `config` has the first number of nodes. `to_json` writes every field of the classes below
under its own name.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_tlt.observe.files import write_atomically

SCHEMA = "megatron-tlt/simulation/2"
MODES = ("off", "suffix", "frozen", "tlt", "pre", "tlt+pre")  # ways of running: `modes.in_mode`
SIM_PHASES = ("rollout", "stop", "score", "logprobs", "update", "weight_sync")
"""In order. rollout: until the slowest replica is done; stop: until training and pre-rollouts have stopped, and every
rank has these."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One RL step, or the mean of some."""

    phases: dict[str, float]
    """Seconds by phase (`SIM_PHASES`)."""
    tokens: float
    """Tokens of all responses."""
    matching_tokens: float
    """Of these, pre-rolled ones before their response's first mismatch."""
    idle_gpu_seconds: float
    """GPU-seconds of replicas that waited for slower ones, those trained or pre-rolled in included."""
    recovered_gpu_seconds: float
    """Of these, inside micro-steps of drafter training."""
    pre_rolling_gpu_seconds: float
    """Of these, in pre-rollouts."""
    quality: float
    """The drafter's at the step's start: 0 never adapted to this policy, 1 adapted to it."""
    preemptions: float
    """Requests that lost their KV cache and were computed again."""

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return sum(self.phases.values())


@dataclass(frozen=True, slots=True)
class Point:
    """One mode on one number of nodes."""

    mode: str
    nodes: int
    gpus: int
    seconds: float
    """Mean of a step."""
    mean: StepRecord
    """Of all steps."""
    steps: list[StepRecord]


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
        write_atomically(path, [json.dumps(self.to_json(), indent=1)])
