"""Idle ranks, which wait for the slowest one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from megatron_tlt.config.base import Section

POLL_S = 0.002  # sleep between two looks of a waiting rank that does not train: little against a micro-step


class IdleSection(Section):
    """Idle ranks: when they pre-roll and train the drafter, and how ranks report their state. Responses depend on it
    by rounding at most, as on `rollout.speculation`.
    """

    pre_rollout: Literal["auto"] | bool = "auto"
    """While waiting for other ranks, decode the prompts of the next two steps: these verify the responses in place of
    decoding them (docs/guides/pre_rollouts.md); with an environment, their first turns. auto: wherever it runs, which
    is the embedded engine and vLLM without router replay. With rollout.release_cache the KV cache is there in windows,
    too."""
    pre_rollout_mib: float = Field(default=256.0, gt=0)
    """Most memory of all pre-rolled responses that replicas pass to each other after a rollout, 4 bytes a token, the
    longest responses first; the others are dropped (`pre_rollout/dropped_tokens`). As much again for an evaluation's
    responses, which the next one verifies."""
    train_drafter: bool = False
    """Train the drafter while waiting for other ranks: a quarter of the time where prompts are left to pre-roll."""
    min_tail_seconds: NonNegativeFloat = 0.02
    """Least seconds that a rank has waited before it pre-rolls or trains: the wait is taken to last as long again. A
    rank whose last micro-step took longer waits for as long as that before it trains."""
    min_steps_per_window: NonNegativeInt = 0
    """Training micro-steps after every rollout, whether a rank waits or not: every rank takes them, and the step lasts
    so much longer. For runs of one rollout replica, where no rank ever waits."""
