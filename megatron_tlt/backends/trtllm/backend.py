"""The TensorRT-LLM backend: the rank's side of an engine in another process.

Nothing here has met a real TensorRT-LLM (docs/operations.md says what has been run). Answers are sampled by the engine
in its own way: they depend on timing, so runs agree in distribution and not token by token.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any

from megatron_tlt.backends.remote import RemoteBackend
from megatron_tlt.backends.trtllm.args import SLEEP_TAGS, build_sampling_params
from megatron_tlt.errors import BackendError
from megatron_tlt.types import (
    CAPABILITIES,
    BackendCapabilities,
    EngineStats,
    HiddenStateSample,
    SamplingParams,
    SpeculationStats,
)

logger = logging.getLogger(__name__)


class TrtllmBackend(RemoteBackend):
    """A `RolloutBackend` around a TensorRT-LLM engine."""

    def __init__(self, *args: Any, **kwargs: Any):
        """As `RemoteBackend`."""
        super().__init__(*args, **kwargs)
        self._sleeps = self._rollout.trtllm.sleep != "none"
        self._asleep = False
        self._warned = False

    @property
    def capabilities(self) -> BackendCapabilities:
        """What this engine supports."""
        return CAPABILITIES["trtllm"]

    def _request(self, seed: int, prompt_id: int, sample_index: int) -> dict[str, Any]:
        return {"seed": request_seed(seed, prompt_id, sample_index)}

    def _sampling(self, params: SamplingParams) -> dict[str, Any]:
        rollout = self._rollout
        speculative = rollout.speculation.uses_eagle or rollout.trtllm.speculation != "none"
        try:
            return build_sampling_params(params, self._eos_token_ids, speculative=speculative)
        except ValueError as error:
            raise BackendError(f"TensorRT-LLM cannot sample so: {error}") from error

    def _after_generate(self) -> None:
        if self._sleeps:
            self.release()

    def collect_hidden_states(self, sink: Callable[[HiddenStateSample], None] | None) -> None:
        """Raises BackendError for a sink: this engine gives no hidden states (`check` refuses what needs them)."""
        if sink is not None:
            raise BackendError("TensorRT-LLM engines give no hidden states to train a drafter on")

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
        """Opens a push of `version`, with the KV cache's memory given back where that is wanted; one that was open and
        never finished is given up.
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
        if (reply["error"] is not None or totals["missed"]) and not self._warned:
            why = reply["error"] or f"{totals['missed']} iterations were not reported"
            logger.warning("figures of steps and drafts are incomplete: %s", why)
            self._warned = True
        rows, accepted = totals["numRequestsWithDraftTokens"], totals["numAcceptedTokens"]
        stats.steps = totals["iterations"]
        stats.speculation = SpeculationStats(
            row_steps=rows, drafted_tokens=totals["numDraftTokens"], emitted_tokens=rows + accepted
        )
        return stats


def request_seed(seed: int, prompt_id: int, sample_index: int) -> int:
    """A seed of 63 bits for one request. Samples of a prompt differ in it, but it is no promise of equal answers."""
    text = f"{seed}/{prompt_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
