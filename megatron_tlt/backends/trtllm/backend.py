"""The TensorRT-LLM backend: the rank's side of an engine in another process.

Experimental: it has never run with a real TensorRT-LLM (docs/guides/trtllm.md). The engine's own sampler draws
responses, which depend on timing: runs agree in distribution and not token by token.
"""

from __future__ import annotations

import logging
from typing import Any

from megatron_tlt.backends.remote import RemoteBackend
from megatron_tlt.backends.trtllm.args import SLEEP_TAGS, build_sampling_params
from megatron_tlt.interfaces import CAPABILITIES
from megatron_tlt.types import EngineStats, SamplingParams, SpeculationStats

_log = logging.getLogger(__name__)


class TrtllmBackend(RemoteBackend):
    """A `RolloutBackend` around a TensorRT-LLM engine."""

    capabilities = CAPABILITIES["trtllm"]

    def __init__(self, *args: Any, **kwargs: Any):
        """As `RemoteBackend`."""
        super().__init__(*args, **kwargs)
        self._sleeps = self._rollout.release_cache
        self._asleep = False
        self._warned = False

    def _sampling(self, params: SamplingParams) -> dict[str, Any]:
        return build_sampling_params(params, self._eos_token_ids)

    def _before_generate(self) -> None:
        self.resume()

    def _after_generate(self) -> None:
        if self._sleeps:
            self.release()

    def release(self) -> None:
        """Gives the KV cache's memory back until `resume`. A second call does nothing."""
        if not self._asleep:
            self.process.call("release", tags=list(SLEEP_TAGS))
            self._asleep = True

    def resume(self) -> None:
        """Allocates the KV cache's memory again. Without a `release` before it, it does nothing."""
        if self._asleep:
            self.process.call("resume", tags=list(SLEEP_TAGS))
            self._asleep = False

    def begin_update(self, version: int) -> None:
        """Opens a weight sync of `version`, with the KV cache's memory given back where that is wanted; one that was
        open and never finished is given up.
        """
        if self._sleeps:
            self.release()
        super().begin_update(version)

    def take_stats(self) -> EngineStats:
        """Counters since the last call: requests and tokens by our own count, steps and drafts by the engine's. Resets
        them.
        """
        reply = self.process.call("stats")
        totals, stats = reply["totals"], self._stats
        self._stats = EngineStats()
        lacks = reply["error"]
        if lacks is None and stats.generated_tokens and not totals["iterations"]:
            lacks = "get_stats is empty, as it is of TensorRT-LLM's Ray executor"
        if lacks is not None and not self._warned:
            _log.warning("counts of steps and drafts are incomplete, or 0: %s", lacks)
            self._warned = True
        rows, accepted = totals["numRequestsWithDraftTokens"], totals["numAcceptedTokens"]
        stats.steps = totals["iterations"]
        stats.speculation = SpeculationStats(
            row_steps=rows,
            drafted_tokens=totals["numDraftTokens"],
            accepted_tokens=accepted,
            emitted_tokens=rows + accepted,
        )
        return stats
