"""What a rollout of one replica came to. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class ReplicaRollout:
    """Arrays by event, in order of time; the first is at 0."""

    times: np.ndarray  # float64 [E], seconds since the rollout began
    running: np.ndarray  # int64 [E], requests that decode or are to, from then on; the last is 0
    generated: np.ndarray  # float64 [E], tokens of all requests up to then
    lengths: np.ndarray  # int64 [R], ascending
    accept_length: float = 0.0
    preemptions: int = 0

    @property
    def seconds(self) -> float:
        """Until the last answer's end; 0 without requests."""
        return float(self.times[-1]) if len(self.times) else 0.0


def empty() -> ReplicaRollout:
    """Of a replica that got no prompt."""
    none = np.zeros(1)
    return ReplicaRollout(none, np.zeros(1, np.int64), none, np.zeros(0, np.int64))
