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
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_tlt.backends.parked_turns import DrawnTurn, ParkedTurns
from megatron_tlt.backends.remote_weights import RemoteWeights
from megatron_tlt.errors import BackendError
from megatron_tlt.rollout.ends import cut_reason, is_turn_end, take_result
from megatron_tlt.rollout.request import Request
from megatron_tlt.types import (
    BackendCapabilities,
    EngineStats,
    FinishReason,
    GenerateCall,
    Sample,
    SamplingParams,
)

if TYPE_CHECKING:
    from megatron_tlt.backends.options import EngineOptions
    from megatron_tlt.backends.process import EngineProcess
    from megatron_tlt.backends.serving import Message
    from megatron_tlt.sync.served_weights import ServedWeights

_log = logging.getLogger(__name__)
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "cancelled": "abort"}
_POLL_S = 0.02  # of waiting for the engine between two polls of environments


class RemoteBackend(RemoteWeights):
    """A `RolloutBackend` around an engine in a process of its own."""

    def __init__(
        self,
        process: EngineProcess,
        weights: ServedWeights,
        options: EngineOptions,
        eos_token_ids: Sequence[int] = (),
    ):
        """`process` has an engine that was started with `options`. Without weights it refuses to generate until a
        weight sync has arrived.
        """
        super().__init__(process, weights, options)
        self._eos_token_ids = tuple(eos_token_ids)
        self._is_shared = options.tp is not None and options.tp.size > 1
        self._name = process.launch.name
        self._requests = 0
        # Of the generate under way: waiting requests, in the order in which they start, and those that the engine has.
        self._wanted: Iterator[Request] = iter(())
        self._pending: dict[int, Request] = {}  # by the number of the present turn's message
        self._parked = ParkedTurns()
        self._arguments: dict[str, Any] = {}
        self._drawn_tokens = self._idle_beats = 0
        self._lengths = np.zeros(0, np.int32)
        self._stats = EngineStats()

    # -- what engines do differently ------------------------------------------------------------------------

    capabilities: BackendCapabilities
    """The capabilities of this engine."""

    @abstractmethod
    def _sampling(self, params: SamplingParams) -> dict[str, Any]:
        """Sampling arguments of a request, as plain data. Raises BackendError."""

    def _add_kept(self, sample: Sample, turn: DrawnTurn) -> None:
        """Reads what lies beside the message of a sample's last turn. Mutates the sample."""

    def _drop_response(self, message: Mapping[str, Any]) -> None:
        """Removes what lies beside a message."""

    # -- responses ----------------------------------------------------------------------------------------------

    def generate(self, call: GenerateCall) -> list[Sample]:
        """See `RolloutBackend.generate`. `Sample.logprobs` is empty: see `BackendCapabilities.logprobs`."""
        self._must_serve(call.params)
        if call.turns is not None and not self.capabilities.turns:
            raise BackendError(f"{self._name} does not run the turns of environments")
        self._before_generate()
        started = time.perf_counter()
        self._arguments = self._sampling(call.params)
        self._parked = ParkedTurns(call, self._options.tp)
        self._drawn_tokens = 0
        parked = self._stats.parked_seconds
        self._lengths = np.zeros(0, np.int32)
        self._wanted = self._requests_of(call)
        try:
            self._fill()
            samples = self._collect(started, call)
        except BaseException:  # also an interrupt: requests must not run on, nor their responses reach the next call
            self._abandon()
            raise
        self._stats.seconds += time.perf_counter() - started - (self._stats.parked_seconds - parked)
        self._stats.finished_requests += len(samples)
        self._after_generate()
        samples.sort(key=lambda s: (s.prompt_id, s.sample_index))
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

    def _requests_of(self, call: GenerateCall) -> Iterator[Request]:
        """The requests that `generate` has to make. Raises BackendError for a prompt that is too long."""
        most = self._options.model.max_context
        stops = frozenset(self._arguments["stop_token_ids"] or ())
        order = count()
        for prompt in call.prompts:
            total = len(prompt.token_ids) + call.params.max_tokens
            if total > most:
                raise BackendError(
                    f"prompt {prompt.prompt_id}: prompt and response of {total} tokens exceed the context of {most}"
                )
            self._stats.prompt_tokens += len(prompt.token_ids)
            self._parked.add_prompt(prompt)
            tokens = np.array(prompt.token_ids, np.int32)
            for index in range(call.num_samples):
                if (prompt.prompt_id, index) in call.have:
                    continue
                request = Request(tokens, call.params, prompt.prompt_id, index, next(order), stops)
                request.takes_turns = call.turns is not None
                if (begun := call.begun.get((prompt.prompt_id, index))) is not None:
                    request.begin_with(begun)
                yield request

    def _fill(self) -> None:
        """Submits requests: as many as the engine runs at once where responses are keyed, else all. Parked ones count:
        there is room when their environments answer.
        """
        most = self._rollout.max_running_requests if self.capabilities.keyed_sampling else math.inf
        while len(self._pending) + len(self._parked) < most and (request := next(self._wanted, None)) is not None:
            self._submit(request)

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
        self.process.send({"type": "submit", **message})

    def _collect(self, started: float, call: GenerateCall) -> list[Sample]:
        """Waits until nothing is queued, in flight by our own count, or parked.

        Ranks of one engine get the same responses and heartbeats "in_step" in one order: at these they poll the
        environments and report progress, which is collective. Heartbeats of a process's own count for liveness only.
        """
        samples: list[Sample] = []
        self._idle_beats = 0
        self._stats.started = self._stats.started or started
        while self._pending or len(self._parked):
            ended: list[Sample] = []
            if self._pending:
                is_alone = self._is_shared or not len(self._parked)
                message = self.process.next_response(None if is_alone else _POLL_S)
                if message is not None and message["type"] == "response":
                    ended += self._take_response(message)
                elif message is not None:
                    self._take_beat(message)
                    if self._is_shared and not message.get("in_step"):
                        continue
            if len(self._parked):
                ended += self._continue_turns()
            self._fill()
            samples += ended
            if call.on_response is not None:
                for sample in ended:
                    call.on_response(sample)
            running = min(len(self._pending), self._rollout.max_running_requests)
            curve = self._stats.running_curve
            if not curve or curve[-1][1] != running:
                curve.append((time.perf_counter() - started, running))
            if call.on_progress is not None:
                waiting = len(self._pending) - running + len(self._parked)
                call.on_progress(running, waiting, self._drawn_tokens)
        return samples

    def _take_beat(self, message: Mapping[str, Any]) -> None:
        """Notes a heartbeat. Raises BackendError at the second one of an engine that has nothing of what is pending: a
        response may be on its way during one.
        """
        has_none = message.get("in_flight") == 0 and message.get("last_request") == self._requests
        self._idle_beats = self._idle_beats + 1 if has_none else 0
        if self._idle_beats > 1:
            raise self.process.failure(f"has no requests, but {len(self._pending)} wait for responses")
        self._lengths = np.array(message.get("lengths", ()), np.int32)

    def _take_response(self, message: Message) -> list[Sample]:
        """A turn that the engine has drawn: it is passed to its environment, or its response has ended."""
        self._idle_beats = 0
        try:
            turn = self._read(message)
        except BackendError:
            self._drop_response(message)
            raise
        if is_turn_end(turn.request, len(turn.request.output)):
            self._parked.park(turn)
            self._stats.turns += 1
            return []
        return [self._end(turn)]

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
        if text is None:
            tokenizer = self._options.tokenizer
            text = "" if tokenizer is None else tokenizer.decode(request.output[request.turn_start :])
        self._drawn_tokens += len(token_ids)
        self._stats.generated_tokens += len(token_ids)
        return DrawnTurn(request, message, text)

    def _continue_turns(self) -> list[Sample]:
        """Continues requests with what their environments have returned; returns the samples of those that have ended.

        Where the engine has nothing to draw it waits for a first result, for a moment.
        """
        started, is_busy = time.perf_counter(), bool(self._pending)
        ended: list[Sample] = []
        for turn, result in self._parked.poll(wait=not is_busy):
            request = turn.request
            request.finish_reason = take_result(request, result)
            if request.finish_reason is not None:
                ended.append(self._end(turn))
                continue
            self._drop_response(turn.message)  # the next turn's has all positions
            request.give(result.given)
            self._stats.given_tokens += len(result.given)
            self._submit(request)
        if not is_busy:
            self._stats.add_parked(started, time.perf_counter())
        return ended

    def _end(self, turn: DrawnTurn) -> Sample:
        """The sample of a request that has ended with this turn."""
        request, name = turn.request, (turn.request.prompt_id, turn.request.sample_index)
        assert request.finish_reason is not None
        if request.finish_reason == "length":
            self._parked.discard(request)
        sample = Sample(*name, request.output, [], turn.text, request.finish_reason, self._weights.version)
        sample.given, sample.turn_rewards, sample.failure = request.given, request.turn_rewards, request.failure
        sample.turn_seconds = request.turn_seconds
        sample.earlier = request.earlier
        try:
            self._add_kept(sample, turn)
        finally:
            self._drop_response(turn.message)
        return sample

    def _abandon(self) -> None:
        """Drops the queue and all requests in flight: the engine ends them before its reply to `abort`. Closes the
        environments of what has begun.
        """
        self._wanted = iter(())
        try:
            if self._pending and self.process.is_alive:
                self.process.call("abort")
        except BackendError as error:
            _log.warning("after an interrupted rollout: %s", error)
        for request in self._pending.values():
            self._parked.discard(request)
        self._pending.clear()
        for message in self.process.responses:
            self._drop_response(message)
        self.process.responses.clear()
        self._parked.abandon(self._drop_response)

    def running_lengths(self) -> np.ndarray:
        """Tokens of each running response at the last heartbeat, int32 [B]; empty where the engine reports none."""
        return self._lengths
