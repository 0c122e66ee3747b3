"""The TensorRT-LLM backend: the rank's side of an engine in another process.

Nothing here has met a real TensorRT-LLM (docs/operations.md says what has been run). Answers are sampled by the engine
in its own way: they depend on timing, so runs agree in distribution and not token by token.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_tlt.backends.base import BaseBackend
from megatron_tlt.backends.trtllm.args import SLEEP_TAGS, build_sampling_params
from megatron_tlt.backends.wire import WireError
from megatron_tlt.errors import BackendError, SyncError, shortened
from megatron_tlt.rollout.spec.history import AnswerHistory
from megatron_tlt.sync.buckets import checksum
from megatron_tlt.types import (
    TRTLLM_CAPABILITIES,
    BackendCapabilities,
    EngineStats,
    FinishReason,
    HiddenStateSample,
    Prompt,
    Sample,
    SamplingParams,
    SpeculationStats,
    WeightBucket,
)

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.backends.trtllm.process import EngineProcess
    from megatron_tlt.backends.trtllm.weights import Transport
    from megatron_tlt.config.rollout import RolloutSection
    from megatron_tlt.interfaces import ProgressCallback, Tokenizer
    from megatron_tlt.sync.served_weights import ServedWeights

logger = logging.getLogger(__name__)
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "cancelled": "abort"}

_HISTORY_MIB = 64  # lengths only


class TrtllmBackend(BaseBackend):
    """A `RolloutBackend` around an engine in a process of its own."""

    def __init__(
        self,
        process: EngineProcess,
        transport: Transport,
        weights: ServedWeights,
        rollout: RolloutSection,
        *,
        max_context: int,
        eos_token_ids: Sequence[int] = (),
        drafter_names: frozenset[str] = frozenset(),
        tokenizer: Tokenizer | None = None,
    ):
        """`process` has a started engine. Without weights it refuses to answer until a push has arrived.

        `max_context`: tokens of the longest prompt and answer. `drafter_names`: the tensors that the drafter was
        started with.
        """
        longest_first = rollout.order == "longest_first"
        super().__init__(weights, AnswerHistory(1, 0, _HISTORY_MIB) if longest_first else None, longest_first)
        self._process: EngineProcess | None = process
        self._transport, self._tokenizer, self._rollout = transport, tokenizer, rollout
        self._max_context, self._eos_token_ids = max_context, tuple(eos_token_ids)
        self._drafter_names = drafter_names
        self._sleeps = rollout.trtllm.sleep != "none"
        self._drafter_sums: dict[str, int] = {}  # of the open push
        self._asleep = False
        self._requests = 0
        self._stats = EngineStats()
        self._warned = False

    @property
    def capabilities(self) -> BackendCapabilities:
        """What this engine supports."""
        return TRTLLM_CAPABILITIES

    @property
    def process(self) -> EngineProcess:
        """The engine's process. Raises BackendError after `close`."""
        if self._process is None:
            raise BackendError("the rollout backend is closed")
        return self._process

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        num_samples: int,
        on_progress: ProgressCallback | None = None,
    ) -> list[Sample]:
        """All samples of all prompts, sorted by (prompt_id, sample_index); see `RolloutBackend.generate`.

        `Sample.logprobs` is empty: see `BackendCapabilities.logprobs`.
        """
        self._must_serve(prompts, params)
        self.resume()
        started = time.perf_counter()
        pending: dict[int, tuple[int, int]] = {}
        arguments = self._sampling(params)
        try:
            for prompt in self._ordered(prompts):
                self._submit(prompt, params.seed, num_samples, arguments, pending)
            samples = self._collect(
                pending, started, frozenset(arguments["stop_token_ids"] or ()), on_progress
            )
        except BaseException:  # also an interrupt: what runs must not run on, or answer the next call
            self._abandon(pending)
            raise
        self._stats.seconds += time.perf_counter() - started
        self._stats.finished_requests += len(samples)
        self._stats.prompt_tokens += sum(len(p.token_ids) for p in prompts)
        if self._sleeps:
            self.release()
        samples.sort(key=lambda s: (s.prompt_id, s.sample_index))
        return samples

    def _must_serve(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Raises BackendError for a request that cannot be answered now, or as it is asked."""
        assert self.process
        self._weights.check_ready()
        if params.stop:
            raise BackendError(f"stop strings {params.stop!r}: TensorRT-LLM stops at tokens only")
        most = self._max_context
        for prompt in prompts:
            total = len(prompt.token_ids) + params.max_tokens
            if total > most:
                raise BackendError(
                    f"prompt {prompt.prompt_id}: prompt and answer of {total} tokens exceed the context of {most}"
                )

    def _submit(
        self,
        prompt: Prompt,
        seed: int,
        num_samples: int,
        arguments: Mapping[str, Any],
        pending: dict[int, tuple[int, int]],
    ) -> None:
        """One request a sample: engines differ in what they make of several samples in one. Adds to `pending`."""
        first = self._requests + 1
        self._requests += num_samples
        numbers = range(first, first + num_samples)
        requests = [{"id": n, "seed": request_seed(seed, prompt.prompt_id, n - first)} for n in numbers]
        ids = [int(i) for i in prompt.token_ids]
        try:
            self.process.send({"type": "submit", "requests": requests, "token_ids": ids, "params": arguments})
        except WireError as error:
            raise BackendError(f"prompt {prompt.prompt_id}: {error}") from error
        pending.update({n: (prompt.prompt_id, n - first) for n in numbers})

    def _sampling(self, params: SamplingParams) -> dict[str, Any]:
        speculative = self._rollout.trtllm.speculation != "none"
        try:
            return build_sampling_params(params, self._eos_token_ids, speculative=speculative)
        except ValueError as error:
            raise BackendError(f"TensorRT-LLM cannot sample so: {error}") from error

    def _collect(
        self,
        pending: dict[int, tuple[int, int]],
        started: float,
        stops: frozenset[int],
        on_progress: ProgressCallback | None,
    ) -> list[Sample]:
        """Waits until nothing is in flight by our own count. Empties `pending`."""
        samples: list[Sample] = []
        tokens = 0
        self._stats.started = self._stats.started or started
        while pending:
            message = self.process.next_answer()
            if message["type"] == "answer":
                samples.append(self._sample(message, stops, pending))
                tokens += len(samples[-1].token_ids)
                self._stats.generated_tokens += len(samples[-1].token_ids)
            running = min(len(pending), self._rollout.max_running_requests)
            self._stats.running_curve.append((time.perf_counter() - started, running))
            if on_progress is not None:
                on_progress(running, len(pending) - running, tokens)
        return samples

    def _sample(
        self, message: Mapping[str, Any], stops: frozenset[int], pending: dict[int, tuple[int, int]]
    ) -> Sample:
        key = pending.pop(message["id"], None)
        if key is None:
            raise self.process.failure(f"answered request {message['id']}, which was not submitted")
        if "error" in message:
            raise BackendError(f"TensorRT-LLM could not answer prompt {key[0]}: {message['error']}")
        token_ids, reason = list(message["token_ids"]), _REASONS.get(str(message["finish_reason"]))
        if reason is None:
            raise BackendError(f"prompt {key[0]}: unknown finish reason {message['finish_reason']!r}")
        if reason == "stop" and (not token_ids or token_ids[-1] not in stops):
            raise BackendError(
                f"prompt {key[0]}: the engine stopped at a token that it left out, or at none of ours"
            )
        text = self._tokenizer.decode(token_ids) if self._tokenizer is not None else ""
        return Sample(key[0], key[1], token_ids, [], text, reason, self._weights.version)

    def _abandon(self, pending: dict[int, tuple[int, int]]) -> None:
        """Aborts what is in flight and waits for its end, unless the engine is gone."""
        try:
            if not pending or not self.process.is_alive:
                return
            self.process.call("abort")
            while pending:
                pending.pop(self.process.next_answer().get("id", 0), None)
        except BackendError as error:
            logger.warning("after an interrupted rollout: %s", error)

    def running_lengths(self) -> np.ndarray:
        """Empty: the engine does not report answers under way."""
        return np.zeros(0, np.int32)

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
        self._weights.begin(version)
        self._drafter_sums = {}
        self._transport.finish()  # of a push that was given up
        self.process.call("begin_update", version=version, verify=self._weights.keep_checksums)

    def update_weights(self, bucket: WeightBucket) -> None:
        """Sends some tensors of the open push. Raises SyncError on a wrong version, name or shape, BackendError."""
        tensors = self._weights.accept(bucket)
        if tensors:
            self._transport.send(bucket.version, tensors)
            self._weights.mark_loaded(tensors)

    def update_drafter(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sends the drafter's tensors into the open push. Raises SyncError.

        They are exactly those it was started with: a head or embedding beside them would overwrite the policy's.
        """
        policy_version = self._weights.require_open(f"a drafter of version {version}")
        names = self._drafter_names
        if not names:
            raise SyncError(f"a drafter of version {version} came to an engine that has none")
        if weights.keys() != names:
            wrong = shortened(sorted(weights.keys() ^ names))
            raise SyncError(
                f"the drafter of version {version} has not the tensors it was started with: {wrong}"
            )
        self._transport.send(policy_version, list(weights.items()), drafter=True)
        self._weights.accept_drafter(version)
        if self._weights.keep_checksums:
            self._drafter_sums = {name: checksum(tensor) for name, tensor in weights.items()}

    def finish_update(self) -> None:
        """Closes the push; the engine serves the new version. Raises SyncError if a tensor has not come."""
        version = self._weights.require_complete()
        reply = self.process.call("finish_update", version=version)
        self._transport.finish()
        if reply["drafter_checksums"] != self._drafter_sums:
            raise SyncError(f"the engine holds other bytes of the drafter than version {version} has")
        self._weights.commit(reply["checksums"])

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

    def close(self) -> None:
        """Ends the engine's process. A second call does nothing."""
        if self._process is not None:
            self._process.close()
            self._transport.close()
        self._process = None


def request_seed(seed: int, prompt_id: int, sample_index: int) -> int:
    """A seed of 63 bits for one request. Samples of a prompt differ in it, but it is no promise of equal answers."""
    text = f"{seed}/{prompt_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
