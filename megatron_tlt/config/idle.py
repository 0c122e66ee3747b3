"""Idle ranks, which wait for the slowest one."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from megatron_tlt.config.base import Section


class IdleSection(Section):
    """Idle ranks: when they train the drafter, and how ranks report their state. Responses never depend on it."""

    train_drafter: bool = False
    """Train the drafter while waiting for other ranks."""
    min_tail_seconds: NonNegativeFloat = 0.02
    """Least seconds that a rank has waited before it trains: the wait is taken to last as long again. A rank whose
    last micro-step took longer waits for as long as that."""
    min_steps_per_window: NonNegativeInt = 0
    """Training micro-steps after every rollout, whether a rank waits or not: every rank takes them, and the step lasts
    so much longer. For runs of one rollout replica, where no rank ever waits."""
    poll_ms: float = Field(default=2.0, ge=0.1, le=1000)
    """Sleep between two looks of a waiting rank that does not train, in milliseconds."""
