"""The vLLM backend: the rank's side of an engine in another process that samples with our noise.

Responses equal the embedded engine's, with any drafter and with none, up to near-ties: the engines round differently,
and vLLM's matrix products differ in the last bits between batch shapes (docs/reference/engines.md).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_tlt.backends.remote import RemoteBackend
from megatron_tlt.backends.vllm.args import request_args
from megatron_tlt.interfaces import CAPABILITIES
from megatron_tlt.rollout.stops import with_stop_ids
from megatron_tlt.types import SamplingParams


class VllmBackend(RemoteBackend):
    """A `RolloutBackend` around a vLLM engine."""

    capabilities = CAPABILITIES["vllm"]

    def __init__(self, *args: Any, store: dist.Store | None = None, **kwargs: Any):
        """As `RemoteBackend`. `store`: where the engine's processes meet; served here as long as the engine lives."""
        super().__init__(*args, **kwargs)
        self._store = store
        self._sleeps = self._rollout.engine_sleeps(torch.device(self._options.device).type)
        self._asleep: set[str] = set()  # of "kv_cache" and "weights", vLLM's names

    def _sampling(self, params: SamplingParams) -> dict[str, Any]:
        params = with_stop_ids(params, self._options.tokenizer)
        return request_args(params, self._eos_token_ids) | {"hidden": self._sink is not None}

    def _before_generate(self) -> None:
        self._wake("kv_cache")

    def _after_generate(self) -> None:
        self.release()

    def release(self) -> None:
        """Gives the KV cache's memory back until the next `generate`, where vLLM sleeps."""
        if self._sleeps and "kv_cache" not in self._asleep:
            self.process.call("sleep_cache")
            self._asleep.add("kv_cache")

    def release_weights(self) -> None:
        """Releases also the memory of the KV cache."""
        if self._sleeps and "weights" not in self._asleep:
            self.process.call("sleep_weights")
            self._asleep |= {"kv_cache", "weights"}

    def begin_update(self, version: int) -> None:
        """As `RemoteBackend`; the KV cache's memory is given back, for an interrupted rollout has left it."""
        self.release()
        self._wake("weights")
        super().begin_update(version)

    def _wake(self, what: str) -> None:
        """Takes memory again that the engine has given back; PyTorch here returns what it keeps for itself."""
        if what in self._asleep:
            torch.cuda.empty_cache()
            self.process.call("wake", tags=[what])
            self._asleep.remove(what)
