"""The rollout engine: continuous batching over a paged cache, with speculative decoding steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_tlt.config.checks.commands import out_of_range
from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.errors import BackendError
from megatron_tlt.observe.log import announced
from megatron_tlt.rollout.batch import Batch, StepResult
from megatron_tlt.rollout.block_manager import BlockManager
from megatron_tlt.rollout.drive import Advance, DrivenEngine
from megatron_tlt.rollout.graph_pool import GraphPool, PoolSizes
from megatron_tlt.rollout.hidden_states import HiddenStateCollector
from megatron_tlt.rollout.model_runner import ModelRunner
from megatron_tlt.rollout.request import Prefill, Request
from megatron_tlt.rollout.sampler import NativeSample, Sampler
from megatron_tlt.rollout.scheduler import Scheduler, SchedulerLimits
from megatron_tlt.rollout.speculation.build import Drafting, build_speculator
from megatron_tlt.rollout.stops import StopStringFinder, with_stop_ids
from megatron_tlt.types import EngineStats, FinishReason, Prompt, SamplingParams, Trajectory

if TYPE_CHECKING:
    from megatron_tlt.data.tokenizer import HFTokenizer
    from megatron_tlt.models.decoders.base import Decoder
    from megatron_tlt.models.decoders.keyed_noise import SampleKernel
    from megatron_tlt.models.decoders.torch.decoder import TorchDecoder
    from megatron_tlt.rollout.speculation.speculator import Speculator
    from megatron_tlt.types import Sample

_REPORT_EVERY_S = 0.02  # a report must not slow the steps down
_COMMON_EVERY = 4  # steps, see `Engine.common_every`
_NOT_A_NUMBER = (
    "the policy's logits are not finite, so no token can be drawn: its weights hold NaN or infinite values, or values "
    "that overflow in rollout.dtype"
)


@dataclass(frozen=True)
class GraphBudget:
    """Captured graphs for a PyTorch decoder, in at most `nbytes` of device memory (None: no limit).

    Verifying forwards of up to `verify_rows` rows, `rows_each` of a request, have one.
    """

    decoder: TorchDecoder
    nbytes: int | None
    verify_rows: int  # rollout.verify_rows
    rows_each: int = 1  # rollout.speculation.rows_each


class Engine(DrivenEngine):
    """Generates responses with one decoder. All ranks of a tensor-parallel group make the same calls."""

    def __init__(
        self,
        decoder: Decoder,
        limits: SchedulerLimits,
        num_blocks: int,
        block_size: int,
        tokenizer: HFTokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        tp: TensorParallel | None = None,
        native_sample: NativeSample | None = None,
        drafting: Drafting | None = None,
        graphs: GraphBudget | None = None,
        sample_kernel: SampleKernel | None = None,
    ):
        """With `graphs` decoding steps run through a `GraphPool`; `sample_kernel` draws tokens on CUDA.

        Raises ConfigError for a drafter that cannot run.
        """
        self.limits = limits
        self.blocks = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(limits, self.blocks)
        sampler = Sampler(decoder.device, native_sample, sample_kernel)
        kv = decoder.new_kv_cache(num_blocks, block_size)
        pool: GraphPool | None = None
        if graphs is not None:
            sizes = PoolSizes(limits.max_running, limits.max_context, block_size, graphs.verify_rows)
            pool = GraphPool(graphs.decoder, kv, sizes, graphs.nbytes)
        rows = self.scheduler.rows
        self.runner = ModelRunner(decoder, kv, rows, block_size, sampler, tp or TensorParallel(), pool)
        self.speculator: Speculator | None = None
        if drafting is not None:
            self.speculator = build_speculator(drafting, self.scheduler, self.runner)
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._arrivals = 0
        self._stats = EngineStats()
        self._started = time.perf_counter()
        self._last_running = 0
        self.is_released = False  # the cache's memory, until `resume`
        self._collector: HiddenStateCollector | None = None

    def capture_graphs(self, rows_each: int, keep_address: bool = False) -> None:
        """Captures the policy's and the drafter's steps, before the first request; weights need not be there.

        `keep_address`: caches move to memory that keeps its address through `release`. Collective. Mutates.
        """
        assert self.runner.pool is not None and self.is_idle
        trained = None if self.speculator is None else self.speculator.trained
        if keep_address:
            for kv in (self.runner.kv, *([] if trained is None else [trained.kv])):
                kv.fix_address()
        steps = [] if trained is None else trained.steps()
        is_slow = self.runner.device.type == "cuda"
        expected = "about ten seconds, more where kernels are compiled first"
        with announced("capturing CUDA graphs", expected) if is_slow else nullcontext():
            self.runner.pool.capture(rows_each, steps)

    def drop_graphs(self) -> None:
        """Drops captured graphs, before the process groups of their collectives are destroyed. Mutates."""
        if self.runner.pool is not None:
            self.runner.pool.graphs.clear()

    def collect_hidden_states(self, collector: HiddenStateCollector | None) -> None:
        """From now on passes finished responses to `collector`; with None hidden states are kept for the drafter only.
        Only while no request is queued or running. Mutates the runner; collective in a tensor-parallel group.
        """
        assert self.is_idle, "hidden states are collected from a request's first token on"
        self._collector = collector
        if collector is not None:
            self.resume()
            self.runner.keep_pages()
        elif self.speculator is None or self.speculator.trained is None:
            self.runner.drop_pages()

    def record_routed_experts(self) -> None:
        """From now on finished requests name the experts that their tokens chose. Only while no request is queued or
        running, with a model that has experts. Mutates the runner.
        """
        assert self.is_idle, "experts are recorded from a request's first token on"
        self.runner.record_routed_experts()

    @property
    def num_running(self) -> int:
        """Requests that decode."""
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that are queued, prefilling or parked."""
        return self.scheduler.num_waiting

    @property
    def is_idle(self) -> bool:
        """Whether this replica has no request: none that runs, waits or is parked."""
        return self.scheduler.is_idle

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt_id: int,
        dataset_id: str = "",
        *,
        indices: Sequence[int],
        begun: Mapping[int, Sample] | None = None,
        takes_turns: bool = False,
    ) -> list[Request]:
        """Queues samples of one prompt; computes nothing yet. `indices`: theirs.

        Those in `begun` continue a response that an earlier call left unfinished. A response depends on its own index
        only, not on the other samples of the prompt. `takes_turns`: drawn turns are parked for their environments.
        Raises BackendError, naming the numbers, if the request could never run.
        """
        prompt = np.asarray(prompt_token_ids, np.int32)
        self._check(prompt, params, prompt_id)
        params = with_stop_ids(params, self._tokenizer)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        begun = begun or {}
        requests = [
            Request(
                prompt,
                params,
                prompt_id,
                index,
                self._arrivals + i,
                stops,
                self._stop_finder(params),
                dataset_id,
                takes_turns=takes_turns,
            )
            # One prefill of the new ones, then one each: arrivals keep their order.
            for i, index in enumerate(sorted(indices, key=begun.__contains__))
        ]
        for request in requests:
            if request.sample_index in begun:
                request.begin_with(begun[request.sample_index])
        if fresh := [request for request in requests if not request.output]:
            self.scheduler.add(Prefill(prompt, fresh))
        for request in requests:
            if request.output:
                self.scheduler.add(Prefill(request.stream, [request]))
        self._arrivals += len(requests)
        return requests

    def add_response(self, response: Trajectory, seed: int) -> None:
        """Queues a finished response, for its hidden states: all of its tokens but the last are given, so one prefill
        computes them, and the token that is drawn behind them ends the request. `seed`: of its sampling key.

        Raises BackendError, naming the numbers, if it could never run.
        """
        start, size = response.response_start, len(response.logprobs)
        params = SamplingParams(temperature=0.0, max_tokens=size, ignore_eos=True, seed=seed)
        tokens = response.token_ids[:-1]
        name = response.prompt_id, response.sample_index
        self._check(tokens, params, response.prompt_id)
        request = Request(tokens[:start], params, *name, self._arrivals, frozenset())
        request.output, request.logprobs = tokens[start:].tolist(), [0.0] * (size - 1)
        request.given = ((0, size - 1),)
        self.scheduler.add(Prefill(tokens, [request]))
        self._arrivals += 1

    def step(self) -> list[Request]:
        """Computes one batch; returns the requests that ended. Mutates cache, queues and counters.

        Raises BackendError if the logits are not finite.
        """
        assert not self.is_released, "a step while the cache's memory is released"
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        assert not batch.is_empty, "a step with nothing to do: check is_idle first"
        scheduled = time.perf_counter()
        self.runner.copy_blocks(batch.copies)
        draft = None if self.speculator is None else self.speculator.propose(batch)
        result = self.runner.forward(batch) if draft is None else self.runner.verify(draft)
        if (squares := result.logprobs @ result.logprobs) != squares:  # NaN where one is, in a single call
            raise BackendError(_NOT_A_NUMBER)
        self.scheduler.truncate(result)
        if self.speculator is not None:
            self.speculator.record(batch, draft, result)
        finished = self.scheduler.commit(batch, result)
        for request in finished:
            self._finish(request)
        self._emit()
        self._count(batch, result, len(finished), started, scheduled)
        return finished

    def _finish(self, request: Request) -> None:
        """Passes a finished request on, before its blocks are written again."""
        self.runner.read_routed_experts(request)
        if self.speculator is not None:
            self.speculator.drafter.finish(request)
        if self._collector is not None:
            assert self.runner.pages is not None
            self._collector.collect(request, self.runner.pages)

    def _emit(self) -> None:
        """Passes on samples that have arrived; without a further step to compute it waits for all of them. The drafter
        may train then, also while requests are parked, and ranks of an engine must have the same samples.
        """
        if self._collector is not None:
            self._collector.emit(wait=not self.scheduler.has_work)

    def _count(self, batch: Batch, result: StepResult, num_finished: int, started: float, scheduled: float) -> None:
        """Counts a step that was begun and scheduled at these seconds."""
        stats = self._stats
        committed = time.perf_counter()
        stats.seconds += committed - started
        stats.steps += 1
        stats.prefill_steps += not batch.num_decode
        stats.generated_tokens += len(result.tokens)
        if batch.chunks:
            stats.prompt_tokens += batch.num_tokens - batch.num_decode
        stats.finished_requests += num_finished
        is_prefill = not batch.num_decode and self.num_running  # of a step of its own
        if batch.num_decode != self._last_running and not is_prefill:
            self._add_to_curve(batch.num_decode, scheduled)
        if not self.scheduler.has_work:
            self._add_to_curve(0, committed)

    # -- as a `drive.DrivenEngine`

    @property
    def common_every(self) -> int:
        """A call is a broadcast, which must not slow the steps down."""
        return 1 if self.runner.tp.size == 1 else _COMMON_EVERY

    @property
    def report_every_s(self) -> float:
        return _REPORT_EVERY_S

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def has_room(self) -> bool:
        return self.scheduler.has_room

    def begin(
        self, prompt: Prompt, params: SamplingParams, indices: Sequence[int], begun: Mapping[int, Sample], turns: bool
    ) -> None:
        # Drafts that the call brought: a step that also reads prompts verifies none.
        has_drafts = self.speculator is not None and self.speculator.has_pre_rolled
        self.scheduler.separates_prefill = turns or has_drafts
        name = prompt.prompt_id, prompt.dataset_id
        self.add(prompt.token_ids, params, *name, indices=indices, begun=begun, takes_turns=turns)

    def advance(self, may_wait: bool = False) -> Advance:
        """A step."""
        ended = self.step()
        return Advance(ended, self.scheduler.parked.take_ended_turns())

    def extend(self, request: Request, given: Sequence[int]) -> None:
        self.scheduler.extend(request, given)
        request.stop_strings = self._stop_finder(request.params)

    def end(self, request: Request, reason: FinishReason) -> bool:
        if not self.scheduler.end(request, reason, recompute=self.runner.keeps_states):
            return False
        self._finish(request)
        self._emit()
        self._stats.finished_requests += 1
        return True

    def text_of(self, request: Request) -> str:
        """The last turn of a finished or parked request, cut after its stop string; empty without a tokenizer."""
        stops = request.stop_strings
        cut = None if stops is None else stops.cut_text
        return self.text_of_tokens(request.output[request.turn_start :]) if cut is None else cut

    def text_of_tokens(self, token_ids: Sequence[int]) -> str:
        """The tokens' text; empty without a tokenizer."""
        return self._tokenizer.decode(token_ids) if self._tokenizer is not None else ""

    def release(self) -> None:
        """Frees the memory of caches and hidden states until `resume`, while the engine is idle.

        A second call does nothing. Weights and captured graphs stay, and no response changes.
        """
        assert self.is_idle, "a running request needs its cache"
        if self.is_released:
            return
        self.is_released = True
        self.runner.release()
        if self.speculator is not None:
            self.speculator.release()
        _return_to_system(self.runner.device)

    def resume(self) -> None:
        """Allocates the memory again. Without a `release` before it, it does nothing."""
        if not self.is_released:
            return
        # The cache is one allocation: it needs free memory of the device, which PyTorch may hold in its cache.
        _return_to_system(self.runner.device)
        self.runner.resume()
        if self.speculator is not None:
            self.speculator.resume()
        self.is_released = False

    def abort_all(self, may_wait: bool = True) -> list[Request]:
        """Drops every request and frees its blocks; returns them."""
        if self._last_running:
            self._add_to_curve(0, time.perf_counter())
        return self.scheduler.abort_all()

    def take_stats(self) -> EngineStats:
        """Counters since the last call. Resets them."""
        stats = replace(
            self._stats,
            preemptions=self.scheduler.num_preemptions,
            started=self._started,
        )
        if self.runner.pool is not None:
            stats.graph_replays, stats.graph_misses = self.runner.pool.graphs.take_counts()
        if self.speculator is not None:
            stats.speculation = self.speculator.counters.take()
        self._stats, self.scheduler.num_preemptions = EngineStats(), 0
        self._started = time.perf_counter()
        return stats

    def graph_report(self) -> dict[str, Any] | None:
        """Memory and counters of the captured graphs; None where there is no pool. Names as in `GraphStats`."""
        if self.runner.pool is None:
            return None
        graphs = self.runner.pool.graphs
        return {"memory_bytes": graphs.memory_bytes, "captured": len(graphs.keys), **asdict(graphs.stats)}

    def _add_to_curve(self, running: int, now: float) -> None:
        """Records a change of the number of running requests: a point of the curve, not one a step."""
        self._last_running = running
        self._stats.running_curve.append((now - self._started, running))

    def _stop_finder(self, params: SamplingParams) -> StopStringFinder | None:
        if not params.stop:
            return None
        assert self._tokenizer is not None
        return StopStringFinder(self._tokenizer, params.stop)

    def _check(self, prompt: np.ndarray, params: SamplingParams, prompt_id: int) -> None:
        vocab = self.limits.vocab_size
        name = f"prompt {prompt_id}"
        if prompt.size and (int(prompt.min()) < 0 or int(prompt.max()) >= vocab):
            ids = f"{prompt.min()}..{prompt.max()}"
            raise BackendError(f"{name}: token ids {ids} are outside the vocabulary of {vocab}")
        if not all(params.stop):
            raise BackendError(f"{name}: an empty stop string would end every response")
        for field, value, allowed in out_of_range(params):
            raise BackendError(f"{name}: {field} = {value} must be {allowed}")


def _return_to_system(device: torch.device) -> None:
    """Empties PyTorch's cache of freed memory. On CPU large allocations are freed at once."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
