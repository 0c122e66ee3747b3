"""Watching the ranks of a run."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat

from megatron_tlt.config.base import Section


class WatchdogSection(Section):
    """Heartbeats, and what happens without them (docs/operations.md, "What is a stuck or slow job doing")."""

    heartbeat_s: float = Field(default=5.0, ge=0.05, le=600)
    """Every rank's state is written to run_dir/status so often, in seconds."""
    hang_s: NonNegativeFloat = 1800.0
    """A rank that others wait for and that shows no sign of life for so many seconds ends the job, with the stacks of
    all ranks in run_dir/stacks; 0: never. Longer than the longest checkpoint load, update and write."""
    slow_factor: float = Field(default=3.0, gt=1)
    """Rank 0 warns of a phase that takes so many times the median of its earlier durations."""
    slow_min_s: NonNegativeFloat = 30.0
    """Shorter phases are never called slow."""
