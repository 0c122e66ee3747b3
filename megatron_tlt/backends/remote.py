"""The rank's side of an engine in another process: the common part of these backends.

rank                                             the engine's process
RemoteBackend --- EngineProcess: messages ------ serving: loop  --- an EngineHost
RemoteWeights --- transport: tensors, by shared memory or GPU handles
"""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.torch import load

from megatron_tlt.backends.process import END_S
from megatron_tlt.backends.remote_weights import RemoteWeights
from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.errors import BackendError
from megatron_tlt.interfaces import BackendCapabilities
from megatron_tlt.rollout.drive import Advance, Drive, DrivenEngine
from megatron_tlt.rollout.ends import cut_reason, is_turn_end
from megatron_tlt.rollout.request import Request
from megatron_tlt.types import (
    LEAST_TRAINED,
    EngineStats,
    FinishReason,
    GenerateCall,
    HiddenStateSample,
    Prompt,
    Sample,
    SamplingParams,
    SpeculationStats,
    Trajectory,
)

if TYPE_CHECKING:
    from megatron_tlt.backends.options import EngineOptions
    from megatron_tlt.backends.process import EngineProcess
    from megatron_tlt.backends.serving import Message
    from megatron_tlt.sync.served_weights import ServedWeights

_log = logging.getLogger(__name__)
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "cancelled": "abort"}
_POLL_S = 0.02  # of waiting for the engine between two polls of environments


@dataclass(frozen=True, slots=True)
class DrawnTurn:
    """A request whose newest turn is drawn: the engine's message, which may name a file, and the turn's text."""

    request: Request
    message: Message
    text: str


class RemoteBackend(RemoteWeights, DrivenEngine):
    """A `RolloutBackend` around an engine in a process of its own, and a `DrivenEngine`.

    Ranks of one engine get the same responses and heartbeats "in_step" in one order; heartbeats of a process's own
    count for liveness only.
    """

    def __init__(
        self,
        process: EngineProcess,
        weights: ServedWeights,
        options: EngineOptions,
        eos_token_ids: Sequence[int] = (),
        experts_per_token: int = 0,
    ):
        """`process` has an engine that was started with `options`. Without weights it refuses to generate until a
        weight sync has arrived.
        """
        super().__init__(process, weights, options)
        self._eos_token_ids, self._experts_per_token = tuple(eos_token_ids), experts_per_token
        self._sink: Callable[[HiddenStateSample], None] | None = None
        self._tp = options.tp or TensorParallel()
        self._name = process.launch.name
        self._requests = 0
        # Of the generate under way: requests that the engine does not have yet, those that it has, by the number of the
        # present turn's message, and the newest turns of those that are parked or have ended.
        self._queue: deque[Request] = deque()
        self._pending: dict[int, Request] = {}
        self._drawn: dict[Request, DrawnTurn] = {}
        self._arguments: dict[str, Any] = {}
        self._pre_rolled: Mapping[tuple[int, int], np.ndarray] = {}
        self._started = 0.0
        self._orders = count()
        self._idle_beats = 0
        self._steps: int | None = None  # of the engine, at the last heartbeat
        self._lengths = np.zeros(0, np.int32)
        self._stats = EngineStats()

    # -- what engines do differently ------------------------------------------------------------------------

    capabilities: BackendCapabilities
    """The capabilities of this engine."""

    @abstractmethod
    def _sampling(self, params: SamplingParams) -> dict[str, Any]:
        """Sampling arguments of a request, as plain data. Raises BackendError."""

    # -- responses ----------------------------------------------------------------------------------------------

    def collect_hidden_states(
        self,
        sink: Callable[[HiddenStateSample], None] | None,
        offer: Callable[[HiddenStateSample], bool] | None = None,
    ) -> None:
        """From the next `generate` on calls `sink` with the hidden states of finished responses, of as many as fit.
        `offer` is not called: the engine's process has read them by then. Raises BackendError for a sink where the
        engine gives none (`check` refuses what needs them).
        """
        if sink is not None and not self.capabilities.hidden_states:
            raise BackendError(f"{self._name} engines give no hidden states to train a drafter on")
        self._sink = sink

    def generate(self, call: GenerateCall) -> list[Sample]:
        """Responses without log-probabilities: `Sample.logprobs` is empty (`BackendCapabilities.logprobs`)."""
        self._must_serve(call.params)
        if call.turns is not None and not self.capabilities.turns:
            raise BackendError(f"{self._name} does not run the turns of environments")
        if (call.drafts or call.until is not None) and not self.capabilities.pre_rollouts:
            raise BackendError(f"{self._name} verifies no drafts of a call and does not end one before its responses")
        self._before_generate()
        self._started = time.perf_counter()
        self._stats.started = self._stats.started or self._started
        self._arguments = self._sampling(call.params)
        self._orders, self._idle_beats, self._steps, self._lengths = count(), 0, None, np.zeros(0, np.int32)
        self._pre_rolled = call.drafts
        parked = self._stats.parked_seconds
        samples = Drive(self, call, self._tp, self._sample).run()
        self._stats.seconds += time.perf_counter() - self._started - (self._stats.parked_seconds - parked)
        self._after_generate()
        return samples

    def _before_generate(self) -> None:
        """Called before the first request."""

    def _after_generate(self) -> None:
        """Called after the last response."""

    def _must_serve(self, params: SamplingParams) -> None:
        """Raises BackendError if requests cannot be served now, or not with these parameters."""
        assert self.process
        self._weights.check_ready()
        if params.stop and not self.capabilities.stop_strings:
            raise BackendError(f"stop strings {params.stop!r}: {self._name} stops at tokens only")

    # -- as a `drive.DrivenEngine`

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def num_running(self) -> int:
        queued = len(self._queue) if self._may_submit else 0  # those that the engine gets next
        return min(len(self._pending) + queued, self._rollout.max_running_requests)

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + len(self._pending) - self.num_running + len(self._drawn)

    @property
    def has_work(self) -> bool:
        return bool(self._pending) or (bool(self._queue) and self._may_submit)

    @property
    def has_room(self) -> bool:
        return not self._queue and self._may_submit

    @property
    def _may_submit(self) -> bool:
        """The engine gets as many requests as it runs at once where responses are keyed, else all. Parked ones count:
        there is room when their environments answer.
        """
        most = self._rollout.max_running_requests if self.capabilities.keyed_sampling else math.inf
        return len(self._pending) + len(self._drawn) < most

    def begin(
        self, prompt: Prompt, params: SamplingParams, indices: Sequence[int], begun: Mapping[int, Sample], turns: bool
    ) -> None:
        """Raises BackendError for a prompt that is too long."""
        total, most = len(prompt.token_ids) + params.max_tokens, self._options.max_request
        if total > most:
            raise BackendError(
                f"prompt {prompt.prompt_id}: prompt and response of {total} tokens exceed the context of {most}"
            )
        self._stats.prompt_tokens += len(prompt.token_ids)
        tokens = np.array(prompt.token_ids, np.int32)
        stops = frozenset(self._arguments["stop_token_ids"] or ())
        for index in indices:
            name = prompt.prompt_id, index
            request = Request(tokens, params, *name, next(self._orders), stops, takes_turns=turns)
            if index in begun:
                request.begin_with(begun[index])
            self._queue.append(request)
        self._submit_queued()

    def _submit_queued(self) -> None:
        while self._queue and self._may_submit:
            self._submit(self._queue.popleft())
        self._note_running()

    def _submit(self, request: Request) -> None:
        """Has the engine draw the next turn: the whole stream so far is the prompt of a request of its own."""
        self._requests += 1
        self._pending[self._requests] = request
        start = len(request.output)
        message = {
            "id": self._requests,
            "key": request.key,
            "prompt_id": request.prompt_id,
            "token_ids": [*request.prompt.tolist(), *request.output],
            "start": start,
            "params": {**self._arguments, "max_tokens": request.limit - start},
        }
        pre_rolled = self._pre_rolled.get((request.prompt_id, request.sample_index))
        if pre_rolled is not None and len(pre_rolled) > request.turn_start:
            message["pre_rolled"] = pre_rolled.tolist()
        self.process.send({"type": "submit", **message})

    def advance(self, may_wait: bool) -> Advance:
        """Waits for a response or a heartbeat, and takes it."""
        self._submit_queued()
        is_shared = self._tp.size > 1
        message = self.process.next_response(None if is_shared or may_wait else _POLL_S)
        while message is not None and message["type"] != "response":
            has_stepped = self._take_beat(message)
            if not is_shared:
                return Advance(has_stepped=has_stepped)
            if message.get("in_step"):
                return Advance()
            message = self.process.next_response(None)
        if message is None:
            return Advance(has_stepped=False)
        self._idle_beats = 0
        try:
            turn = self._read(message)
        except BackendError:
            self._drop_response(message)
            raise
        request = turn.request
        self._drawn[request] = turn
        self._note_running()
        if is_turn_end(request, len(request.output)):
            request.end_turn()
            return Advance(turns=[request])
        return Advance(ended=[request])

    def _note_running(self) -> None:
        curve, running = self._stats.running_curve, self.num_running
        if not curve or curve[-1][1] != running:
            curve.append((time.perf_counter() - self._stats.started, running))

    def _take_beat(self, message: Mapping[str, Any]) -> bool:
        """Notes a heartbeat; whether the engine has taken steps since the last one, True where it does not count them.
        Raises BackendError at the second one of an engine that has nothing of what is pending: a response may be on its
        way during one.
        """
        has_none = message.get("in_flight") == 0 and message.get("last_request") == self._requests
        self._idle_beats = self._idle_beats + 1 if has_none else 0
        if self._idle_beats > 1:
            raise self.process.failure(f"has no requests, but {len(self._pending)} wait for responses")
        self._lengths = np.array(message.get("lengths", ()), np.int32)
        before, self._steps = self._steps, message.get("steps")
        return self._steps is None or self._steps != before

    def _read(self, message: Message) -> DrawnTurn:
        """Appends the drawn tokens to their request. Raises BackendError."""
        request = self._pending.pop(message["id"], None)
        if request is None:
            raise self.process.failure(f"sent a response to request {message['id']}, which was not submitted")
        prompt = f"prompt {request.prompt_id}"
        if "error" in message:
            raise BackendError(f"{self._name} could not generate a response to {prompt}: {message['error']}")
        request.finish_reason = _REASONS.get(str(message["finish_reason"]))
        if request.finish_reason is None:
            raise BackendError(f"{prompt}: unknown finish reason {message['finish_reason']!r}")
        text: str | None = message.get("text")  # cut behind the stop string that ended it
        token_ids: list[int] = message["token_ids"]
        is_stop = bool(token_ids) and token_ids[-1] in request.stop_token_ids
        if request.finish_reason == "stop" and text is None and not is_stop:
            raise BackendError(f"{prompt}: the engine stopped at a token that it left out, or at none of ours")
        request.output += token_ids
        if request.finish_reason == "length":
            request.finish_reason = cut_reason(request, len(request.output))
        self._stats.generated_tokens += len(token_ids)
        return DrawnTurn(request, message, self._decoded(request) if text is None else text)

    def _decoded(self, request: Request) -> str:
        """The present turn."""
        tokenizer = self._options.tokenizer
        return "" if tokenizer is None else tokenizer.decode(request.output[request.turn_start :])

    def extend(self, request: Request, given: Sequence[int]) -> None:
        self._drop_response(self._drawn.pop(request).message)  # the next turn's has all positions
        request.give(given)
        self._submit(request)

    def end(self, request: Request, reason: FinishReason) -> bool:
        request.finish_reason = reason
        return True

    def text_of(self, request: Request) -> str:
        return self._drawn[request].text

    def _sample(self, request: Request) -> Sample:
        """The sample of a request that has ended or was dropped; reads and removes what lies beside its message."""
        turn = self._drawn.pop(request, None)
        if turn is None:
            turn = DrawnTurn(request, {}, self._decoded(request))
        else:
            self._stats.finished_requests += 1
        sample = request.sample(turn.text, self._weights.version)
        sample.logprobs = []  # the engine sends none; the request's are zeros of given tokens
        try:
            self._add_kept(sample, turn)
        finally:
            self._drop_response(turn.message)
        return sample

    def _add_kept(self, sample: Sample, turn: DrawnTurn) -> None:
        """Reads the file beside the message of a sample's last turn, whose request had the whole stream: hidden states
        and experts are those of all positions. Mutates the sample.
        """
        kept = load(Path(turn.message["kept"]).read_bytes()) if "kept" in turn.message else {}
        if "routed_experts" in kept:
            sample.routed_experts = kept["routed_experts"].unflatten(1, (-1, self._experts_per_token)).numpy()
        if "hidden" in kept and self._sink is not None and len(sample.token_ids) >= LEAST_TRAINED:
            trajectory = Trajectory.of(turn.request.prompt, sample)
            self._sink(HiddenStateSample(trajectory, kept["hidden"], turn.request.key))

    def _drop_response(self, message: Mapping[str, Any]) -> None:
        """Removes the file beside a message."""
        if "kept" in message:
            Path(message["kept"]).unlink(missing_ok=True)

    def abort_all(self, may_wait: bool = True) -> list[Request]:
        """Aborts; the engine ends all requests before it replies, after the step under way. Where it may not wait long
        for that, an engine that hangs is killed.
        """
        try:
            if self._pending and self.process.is_alive:
                self.process.call("abort", patience=None if may_wait else END_S)
        except BackendError as error:
            _log.warning("after an interrupted rollout: %s", error)
        dropped = [*self._queue, *self._pending.values(), *self._drawn]
        for message in [*self.process.responses, *(turn.message for turn in self._drawn.values())]:
            self._drop_response(message)
        for message in self.process.responses:
            if message.get("id") in self._pending:
                self._pending[message["id"]].output += (drawn := message.get("token_ids", []))
                self._stats.generated_tokens += len(drawn)
        for request in dropped:
            request.finish_reason = "abort"
        self.process.responses.clear()
        self._queue.clear()
        self._pending.clear()
        self._drawn.clear()
        self._note_running()
        return dropped

    def running_lengths(self) -> np.ndarray:
        """Tokens of each running response at the last heartbeat, int32 [B]; empty where the engine reports none."""
        return self._lengths

    def take_stats(self) -> EngineStats:
        """Counters since the last call: steps and drafts as `backends.drafting` counts them. Resets them."""
        counts = self.process.call("stats")
        stats, self._stats = self._stats, EngineStats()
        stats.steps = counts["steps"]
        stats.speculation = speculation = SpeculationStats(**counts["speculation"])
        speculation.by_batch = {int(size): counted for size, counted in speculation.by_batch.items()}
        speculation.switches = [(seconds, bool(drafts)) for seconds, drafts in speculation.switches]
        return stats
