"""Finished answers on disk, for a run that is ended in the middle of a rollout."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveInt

from megatron_tlt.config.base import Section


class RolloutCacheSection(Section):
    """The rollout bank, run_dir/bank: finished answers, until a checkpoint covers their step. With keyed sampling they
    are what a resumed run would generate again, so it takes them instead."""

    enabled: bool = True
    """Keep finished answers and reuse them after a restart. Rollouts without keyed sampling (backend:
    trtllm) do not, and say so once."""
    sync_seconds: NonNegativeFloat = 1.0
    """Seconds until a finished answer survives a crash of the machine, too; one of the process it survives at once."""
    max_mib: PositiveInt = 4096
    """Disk space of one rollout replica; answers beyond it are not kept."""
