"""The vLLM backend: the rank's side of an engine in another process that samples with our noise.

Responses equal the embedded engine's, with any drafter and with none, up to near-ties: the engines round differently,
and vLLM's matrix products differ in the last bits between batch shapes (docs/reference/engines.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from megatron_tlt.backends.remote import DrawnTurn, RemoteBackend
from megatron_tlt.backends.vllm.args import request_args
from megatron_tlt.types import (
    CAPABILITIES,
    EngineStats,
    HiddenStateSample,
    Sample,
    SamplingParams,
    SpeculationStats,
    Trajectory,
)

_MIN_TOKENS = 2  # of a response whose hidden states are kept, as in the embedded engine


class VllmBackend(RemoteBackend):
    """A `RolloutBackend` around a vLLM engine."""

    capabilities = CAPABILITIES["vllm"]

    def __init__(self, *args: Any, experts_per_token: int = 0):
        """As `RemoteBackend`."""
        super().__init__(*args)
        self._experts_per_token = experts_per_token
        self._sink: Callable[[HiddenStateSample], None] | None = None
        self._sleeps = self._rollout.engine_sleeps(torch.device(self._options.device).type)
        self._asleep: set[str] = set()  # of "kv_cache" and "weights", vLLM's names

    def _sampling(self, params: SamplingParams) -> dict[str, Any]:
        return request_args(params, self._eos_token_ids) | {"hidden": self._sink is not None}

    # -- memory between rollouts ----------------------------------------------------------------------------------

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
        """See `RolloutBackend.release_weights`; the KV cache's memory, too."""
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

    # -- hidden states ----------------------------------------------------------------------------------------

    def collect_hidden_states(self, sink: Callable[[HiddenStateSample], None] | None) -> None:
        """From the next `generate` on calls `sink` with the hidden states of finished responses, of as many as fit."""
        self._sink = sink

    def _add_kept(self, sample: Sample, turn: DrawnTurn) -> None:
        """The last turn's request had the whole stream, so its hidden states and experts are those of all positions."""
        kept = load(Path(turn.message["kept"]).read_bytes()) if "kept" in turn.message else {}
        if "routed_experts" in kept:
            sample.routed_experts = kept["routed_experts"].unflatten(1, (-1, self._experts_per_token)).numpy()
        if "hidden" in kept and self._sink is not None and len(sample.token_ids) >= _MIN_TOKENS:
            trajectory = Trajectory.of(turn.request.prompt, sample)
            self._sink(HiddenStateSample(trajectory, kept["hidden"], turn.request.key))

    def _drop_response(self, message: Mapping[str, Any]) -> None:
        if "kept" in message:
            Path(message["kept"]).unlink(missing_ok=True)

    # -- statistics --------------------------------------------------------------------------------------------

    def take_stats(self) -> EngineStats:
        """Counters since the last call: steps and drafts are those of the plugin in the engine. Resets them."""
        counts = self.process.call("stats")
        stats, self._stats = self._stats, EngineStats()
        stats.steps = counts["steps"]
        stats.speculation = speculation = SpeculationStats(**counts["speculation"])
        speculation.by_batch = {int(size): counted for size, counted in speculation.by_batch.items()}
        speculation.switches = [(seconds, bool(drafts)) for seconds, drafts in speculation.switches]
        return stats

    def state_dict(self) -> dict[str, Any]:
        """See `EmbeddedBackend.state_dict`."""
        return super().state_dict() | {"vllm": self.process.call("speculation")["state"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned; nothing of another engine, drafter or selector."""
        super().load_state_dict(state)
        self.process.call("load_speculation", state=state.get("vllm", {}))
