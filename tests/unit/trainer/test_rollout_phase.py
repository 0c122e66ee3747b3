"""What a rank reports while it generates, and what it keeps of the responses."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_tlt.data.prompt_queue import PromptQueues
from megatron_tlt.idle.policy import tokens_left
from megatron_tlt.trainer.rollout_phase import RolloutPhase
from megatron_tlt.types import GenerateCall, Prompt, Sample, SamplingParams

PROMPTS = [Prompt(i, f"q{i}", (1, 2), "?") for i in range(5)]


class Recorder:
    """World, display and cache in one: keeps what is reported."""

    rank, size = 1, 2

    def new_counter(self) -> Any:
        return lambda more: len(PROMPTS)

    def __init__(self, lengths: list[int]):
        self.lengths, self.heartbeats, self.shown, self.asked = lengths, [], [], []

    def heartbeat(self, **figures: Any) -> None:
        self.heartbeats.append(figures)

    def generate(self, call: GenerateCall) -> list[Sample]:
        self.asked += [p.prompt_id for p in call.prompts]
        call.on_progress(2, 1, 10)
        return [Sample(self.asked[0], i, [1] * length, [], "", "stop", 0) for i, length in enumerate(self.lengths)]


def make(lengths: list[int]) -> tuple[RolloutPhase, Recorder]:
    seen = Recorder(lengths)
    backend = SimpleNamespace(running_lengths=lambda: np.array([3, 5]), ordered=lambda prompts: prompts[::-1])
    drafter = SimpleNamespace(collecting=nullcontext)
    shutdown = SimpleNamespace(interruptible=lambda generate, call: (generate(call), False))
    queues = PromptQueues(seen, 1, lambda ticket: ticket, None)  # type: ignore[arg-type]
    phase = RolloutPhase(
        seen,
        queues,
        SamplingParams(),
        2,
        backend,
        seen,
        drafter,
        shutdown,
        lambda *figures: seen.shown.append(figures),
    )  # type: ignore[arg-type]
    return phase, seen


def test_progress_goes_to_watchdog_and_display():
    phase, seen = make([7])
    groups = phase.generate(PROMPTS)
    left = tokens_left(np.array([3, 5]), 1, np.array([256.0]))
    assert seen.heartbeats == [{"state": "BUSY", "running": 2, "queued": 1, "longest": 5, "left": left}]
    assert seen.shown == [(2, 1, 10)]
    assert seen.asked == [3, 1], "the share of the second of two replicas, in the engine's order"
    assert [(g.prompt.prompt_id, len(g.samples)) for g in groups] == [(3, 1), (1, 0)]
    phase.generate(PROMPTS)
    assert seen.heartbeats[-1]["left"] == tokens_left(np.array([3, 5]), 1, np.array([7.0])), "of the last responses"
