"""The weight push of a step: policy and drafter from the trainer into every rollout engine, both or none.

    policy.named_weights() -> WeightFingerprint -> sync.push -> backend
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_tlt.actor.policy import MegatronPolicy
    from megatron_tlt.drafter.controller import OnlineDrafterController
    from megatron_tlt.resilience.rollout_cache import RolloutCache
    from megatron_tlt.sync.push import BucketedSync


class WeightPush:
    """Pushes the policy of a run, and the drafter whenever a merge has changed it."""

    def __init__(
        self,
        policy: MegatronPolicy,
        drafter: OnlineDrafterController,
        rollout_cache: RolloutCache,
        sync: BucketedSync,
    ):
        self._policy, self._drafter, self._cache, self._sync = policy, drafter, rollout_cache, sync

    def push(self) -> dict[str, float]:
        """Pushes the present weights. Collective. Returns metrics. Raises SyncError."""
        version = self._policy.policy_version
        weights = self._cache.fingerprint(self._policy.named_weights())  # read on its way to the engine
        drafter = self._drafter.unpublished()
        metrics = self._sync.push(weights, version, drafter)
        if drafter is not None:
            self._drafter.mark_published(drafter[1])
        return metrics
