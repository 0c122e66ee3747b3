"""The one loop of a rollout, over any engine: prompts in, drawn turns to their environments and back, samples out.

prompts --begin--> engine --advance--> ended ----------------------> samples
                     ^        |                                        ^
                     |        +--> turns that ended: parked --env--> end
                     +---------------extend----------------+
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from megatron_tlt.rollout.ends import take_result
from megatron_tlt.rollout.turns import TurnExchange

if TYPE_CHECKING:
    from megatron_tlt.distributed.tensor_parallel import TensorParallel
    from megatron_tlt.rollout.request import Request
    from megatron_tlt.types import EngineStats, FinishReason, GenerateCall, Prompt, Sample, SamplingParams

Name = tuple[int, int]  # prompt id, sample index


class Advance(NamedTuple):
    """What came of one step of an engine."""

    ended: Sequence[Request] = ()  # their `finish_reason` is set
    turns: Sequence[Request] = ()  # that now wait for their environments
    has_stepped: bool = True  # False: the engine has computed nothing since the last one, as far as is known


class DrivenEngine(Protocol):
    """An engine as the loop needs it. All ranks of one engine make the same calls."""

    @property
    def common_every(self) -> int:
        """Steps between two calls that are collective among the engine's ranks (environments, progress). By default
        one, for engines whose step is a response or a heartbeat, which are rare.
        """
        return 1

    @property
    def report_every_s(self) -> float:
        """Least seconds between two reports of progress, of an engine of one rank."""
        return 0.0

    @property
    def stats(self) -> EngineStats:
        """The counters of now, which the loop adds to."""

    @property
    def num_running(self) -> int:
        """Requests that decode."""

    @property
    def num_waiting(self) -> int:
        """Requests that are queued, prefilling or parked."""

    @property
    def has_work(self) -> bool:
        """Whether a request is left that does not wait for its environment."""

    @property
    def has_room(self) -> bool:
        """Whether the samples of one more prompt should start."""

    def begin(
        self, prompt: Prompt, params: SamplingParams, indices: Sequence[int], begun: Mapping[int, Sample], turns: bool
    ) -> None:
        """Queues the samples `indices` of a prompt; those in `begun` continue an earlier response. `turns`: they go to
        environments. Raises BackendError.
        """

    def advance(self, may_wait: bool) -> Advance:
        """Computes one step, or waits for what the engine's process sends: for ever (`may_wait`), else for a moment."""

    def extend(self, request: Request, given: Sequence[int]) -> None:
        """Continues a parked request with `given` tokens."""

    def end(self, request: Request, reason: FinishReason) -> bool:
        """Ends a parked request. False: a later `advance` returns it."""

    def text_of(self, request: Request) -> str:
        """The last turn of a finished or parked request, cut after its stop string."""

    def abort_all(self, may_wait: bool = True) -> list[Request]:
        """Drops every request, and returns them. `may_wait`: for the step under way, however long it takes; else an
        engine in another process may be killed.
        """


class Drive:
    """One rollout of one engine."""

    def __init__(
        self, engine: DrivenEngine, call: GenerateCall, tp: TensorParallel, sample_of: Callable[[Request], Sample]
    ):
        """`sample_of`: the sample of a request that has ended."""
        self._engine, self._call, self._sample_of = engine, call, sample_of
        self._turns = None if call.turns is None else TurnExchange(call.turns, tp, call.while_parked)
        self._parked: dict[Name, Request] = {}  # wait for their environments
        self._prompts = iter(call.prompts)
        self._without: dict[int, set[int]] = defaultdict(set)  # sample indices by prompt id
        for prompt_id, index in call.have:
            self._without[prompt_id].add(index)
        self._begun: dict[int, dict[int, Sample]] = defaultdict(dict)
        for (prompt_id, index), sample in call.begun.items():
            self._begun[prompt_id][index] = sample
        self._tp = tp
        self._first = engine.stats.generated_tokens
        self._steps, self._reported = 0, 0.0
        self._is_interrupted = False

    def run(self) -> list[Sample]:
        """All samples of the call, by prompt id and sample index, or those there are when `GenerateCall.until` ends it.
        If it raises, nothing is left in the engine.
        """
        samples: list[Sample] = []
        try:
            while self._fill():
                if self._must_end():
                    samples += self._unfinished()
                    break
                is_busy = self._engine.has_work
                ended, found = self._continue_turns(is_busy), Advance()
                if self._engine.has_work:
                    found = self._engine.advance(may_wait=not self._parked and self._call.until is None)
                    ended += found.ended
                    self._park(found.turns)
                for request in ended:
                    samples.append(self._finished(request))
                self._steps += 1
                self._report(is_busy, found.has_stepped)
        except BaseException:  # also an interrupt: one refused prompt must not leave other requests in the engine
            for request in self._engine.abort_all(may_wait=not self._is_interrupted):
                self._discard(request)
            raise
        samples.sort(key=lambda s: (s.prompt_id, s.sample_index))
        return samples

    def _must_end(self) -> bool:
        """Whether the call ends before its responses do. Collective."""
        if self._call.until is None or self._steps % self._engine.common_every:
            return False
        return self._tp.broadcast_object(self._tp.rank == 0 and self._call.until())

    def _unfinished(self) -> list[Sample]:
        """Drops every request; samples of those that have a token."""
        dropped = self._engine.abort_all()
        for request in dropped:
            self._discard(request)
        return [self._sample_of(request) for request in dropped if request.output]

    def _fill(self) -> bool:
        """Begins the samples of further prompts while the engine has room. Whether any request is left."""
        while self._has_room() and (prompt := next(self._prompts, None)) is not None:
            without, begun = self._without[prompt.prompt_id], self._begun[prompt.prompt_id]
            if self._turns is not None:
                self._turns.add(prompt)
            indices = [i for i in range(self._call.num_samples) if i not in without]
            self._engine.begin(prompt, self._call.params, indices, begun, self._turns is not None)
        return self._engine.has_work or bool(self._parked)

    def _has_room(self) -> bool:
        engine, most = self._engine, self._call.most_running
        return engine.has_room and (most is None or engine.num_running + engine.num_waiting < most)

    def _continue_turns(self, is_busy: bool) -> list[Request]:
        """Continues requests with what their environments have returned; returns those that have ended.

        Where the engine has nothing else to do it waits for a first result, for a moment.
        """
        if self._turns is None or not self._parked or (is_busy and self._steps % self._engine.common_every):
            return []
        started, ended, stats = time.perf_counter(), [], self._engine.stats
        for result in self._turns.poll(wait=not is_busy):
            request = self._parked.pop((result.prompt_id, result.sample_index), None)
            if request is None:
                continue
            reason = take_result(request, result)
            if reason is None:
                self._engine.extend(request, result.given)
                stats.given_tokens += len(result.given)
            elif self._engine.end(request, reason):
                ended.append(request)
        if not is_busy:
            stats.add_parked(started, time.perf_counter())
        return ended

    def _park(self, requests: Sequence[Request]) -> None:
        """Passes drawn turns to their environments."""
        for request in requests:
            assert self._turns is not None
            self._parked[request.prompt_id, request.sample_index] = request
            self._turns.submit(request, self._engine.text_of(request))
            self._engine.stats.turns += 1

    def _finished(self, request: Request) -> Sample:
        if request.finish_reason == "length":
            self._discard(request)
        sample = self._sample_of(request)
        if self._call.on_response is not None:
            self._call.on_response(sample)
        return sample

    def _discard(self, request: Request) -> None:
        """The request has ended without its environment."""
        if self._turns is not None:
            self._turns.discard(request)

    def _report(self, is_busy: bool, has_stepped: bool) -> None:
        """Looks for an interrupt, also while a step of the engine hangs, and reports progress if there was any."""
        engine, now = self._engine, time.perf_counter()
        if self._tp.size == 1:
            is_due = now - self._reported >= engine.report_every_s
        else:
            is_due = not is_busy or self._steps % engine.common_every == 0
        if not is_due:
            return
        if self._call.check_interrupt is not None:
            self._is_interrupted = True  # if it raises
            self._call.check_interrupt()
            self._is_interrupted = False
        if not has_stepped:  # the next step is reported at once
            return
        self._reported = now
        if self._call.on_progress is not None:
            generated = engine.stats.generated_tokens - self._first
            self._call.on_progress(engine.num_running, engine.num_waiting, generated)
