"""Finished answers on disk, for a run that is ended in the middle of a rollout."""

from __future__ import annotations

from pydantic import PositiveInt

from megatron_tlt.config.base import Section


class RolloutCacheSection(Section):
    """Finished answers in run_dir/rollout_cache, until a checkpoint covers their step. With keyed sampling a resumed
    run would generate the same answers again, so it reads them instead."""

    enabled: bool = True
    """Keep finished answers and reuse them after a restart. Rollouts without keyed sampling (backend:
    trtllm) do not, with one warning."""
    max_mib: PositiveInt = 4096
    """Disk space of one rollout replica; answers beyond it are not kept."""
