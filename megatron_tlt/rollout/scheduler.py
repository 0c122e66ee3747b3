"""Continuous batching: chooses the rows of the next step. Torch-free and without a clock: the simulator runs the same
code.

    waiting ──admit──> prefilling ──prompt done──> ready ──row and block free──> running ──> finished
       ^                    │                        │                              │  │        ^
       ├────────────────────┴───────preempt (latest arrival first)──────────────────┘  │        │
       └──────extend─────── parked (waits for its environment) <─────turn ended────────┘────end─┘

First come, first served: a request that holds blocks arrived before every request that waits. Under memory pressure
the latest arrival is preempted: its blocks are freed and its tokens computed again later. So the oldest request always
progresses. A parked request keeps its blocks and has no row. Its blocks are the first to go: to running requests, and
to queued ones that arrived before it or where nothing else is computed.

With environments, and with drafts that the call brought (`separates_prefill`), a step is either of prefill or of
decoding, since a step with prefill drafts nothing. A step of prefill makes every running request wait for one step; it
comes once the queued ones have waited as many steps, all together. With R running requests and A arrivals a step it
comes every sqrt(2 R / A) steps.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_tlt.errors import BackendError
from megatron_tlt.rollout.batch import Batch, PrefillChunk, StepResult
from megatron_tlt.rollout.block_manager import BlockManager
from megatron_tlt.rollout.ends import computed_again, draw_first, finish_reason, is_turn_end, run_length
from megatron_tlt.rollout.parked import ParkedRequests
from megatron_tlt.rollout.request import Prefill, Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.types import FinishReason


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Sizes that bound a step."""

    max_running: int
    max_batched_tokens: int
    max_context: int
    vocab_size: int


class Scheduler:
    """Schedules every step from its own state only: equal calls give equal decisions on every rank."""

    def __init__(self, limits: SchedulerLimits, blocks: BlockManager):
        self.limits = limits
        self.blocks = blocks
        max_blocks = blocks.blocks_for(limits.max_context)
        sizes = limits.max_running, limits.max_batched_tokens, max_blocks, limits.vocab_size
        self.rows = RunningRows(*sizes, max_output=limits.max_context)
        self.num_preemptions = 0
        self.separates_prefill = False
        self._waited = 0  # steps that the queued requests have waited since the last step of prefill, all together
        self.parked = ParkedRequests()
        self._waiting: list[Prefill] = []  # heap by order
        self._prefilling: list[Prefill] = []  # blocks allocated
        self._ready: list[Prefill] = []  # in order, all in the cache, children to start
        self._reserved = False  # whether rows hold blocks for drafts

    @property
    def num_running(self) -> int:
        """Requests that decode."""
        return self.rows.num_rows

    @property
    def num_waiting(self) -> int:
        """Requests that are queued, prefilling or parked."""
        queues = (self._waiting, self._prefilling, self._ready)
        return sum(len(p.children) for queue in queues for p in queue) + len(self.parked)

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to compute."""
        return bool(self.rows.requests or self._waiting or self._prefilling or self._ready)

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        return not (self.has_work or len(self.parked))

    @property
    def has_room(self) -> bool:
        """Whether the samples of one more prompt should start: fewer than `max_running` are there, and blocks remain
        free once all prompts that wait have theirs, each sample its first one, and each running request its next one.
        """
        if self.num_running + self.num_waiting >= self.limits.max_running:
            return False
        need = sum(self.blocks.blocks_for(len(p.tokens)) - len(p.blocks) for p in self._waiting)
        return need + self.num_running + self.num_waiting - len(self.parked) < self.blocks.num_free

    def add(self, prefill: Prefill) -> None:
        """Queues the samples of one prompt. Raises BackendError if they could never run."""
        self._check(prefill)
        heapq.heappush(self._waiting, prefill)

    def schedule(self) -> Batch:
        """The next step: every running request decodes one token, prompts fill the rest of the token budget. With
        `separates_prefill` it is of one kind.

        Mutates block tables and queues; each call is followed by one `commit` of the same batch.
        """
        batch = Batch(0)
        if self.separates_prefill and self._is_prefill_due():
            self._take_chunks(batch)
            if batch.chunks:
                self._waited = 0
                return batch
        self._grow()
        if self._ready:
            self._start_children(batch)
        batch.num_decode = self.rows.num_rows
        if not self.separates_prefill:
            self._take_chunks(batch)
        return batch

    def _is_prefill_due(self) -> bool:
        """Whether the queued requests have waited as long as a step of prefill would make the running ones wait.

        Mutates the counter of their steps.
        """
        if not (self._waiting or self._prefilling):
            return False
        self._waited += sum(len(p.children) for queue in (self._waiting, self._prefilling) for p in queue)
        return self._waited >= self.rows.num_rows

    def _take_chunks(self, batch: Batch) -> None:
        """Fills the budget of tokens with prefill, in order, as far as rows and memory last."""
        budget = self.limits.max_batched_tokens - self.rows.num_rows
        for prefill in self._prefilling:
            budget = self._take_chunk(batch, prefill, budget)
        while self._waiting and budget > 0 and not self._ready and self._may_admit(self._waiting[0]):
            prefill = heapq.heappop(self._waiting)
            missing = self.blocks.blocks_for(len(prefill.tokens)) - len(prefill.blocks)
            prefill.blocks = prefill.blocks + self.blocks.allocate(missing)
            self._prefilling.append(prefill)
            budget = self._take_chunk(batch, prefill, budget)

    def reserve(self, lengths: np.ndarray) -> np.ndarray:
        """Allocates blocks for `lengths` int32 [D] drafted tokens behind each row's next one; returns how many fit.

        Only free blocks: a draft never preempts a request. `commit` frees the blocks that stay unused.
        """
        rows, size = self.rows, self.blocks.block_size
        positions, have = rows.positions[: rows.num_rows], rows.num_blocks[: rows.num_rows]
        lengths = np.minimum(lengths, rows.block_tables.shape[1] * size - 1 - positions)
        missing = (positions + lengths) // size + 1 - have
        for row in (missing > 0).nonzero()[0].tolist():
            self._reserved = True
            for block in self.blocks.allocate(min(missing.item(row), self.blocks.num_free)):
                rows.add_blocks(row, block)
            lengths[row] = min(lengths.item(row), have.item(row) * size - 1 - positions.item(row))
        return lengths

    def commit(self, batch: Batch, result: StepResult) -> list[Request]:
        """Appends the step's tokens; returns the requests that ended, by order. Frees their blocks."""
        finished = self._commit_rows(result) if batch.num_decode else []
        if batch.chunks:
            finished += self._commit_chunks(batch, result)
        if len(finished) > 1:
            finished.sort(key=lambda r: r.order)
        return finished

    def abort_all(self) -> list[Request]:
        """Drops every request and frees all blocks, after an error elsewhere; returns the requests."""
        dropped = list(self.rows.requests)
        for request in dropped:
            self._leave(request)
        for queue in (self._waiting, self._prefilling, self._ready, self.parked.clear()):
            for prefill in queue:
                self.blocks.free(prefill.blocks)
                dropped += prefill.children
            queue.clear()
        for request in dropped:
            request.finish_reason = "abort"
        return dropped

    # Turns

    def extend(self, request: Request, tokens: Sequence[int]) -> None:
        """Continues a parked request with given `tokens`; it draws again once they are computed. Mutates."""
        prefill = self.parked.pop(request)
        request.give(tokens)
        prefill.tokens = request.stream
        heapq.heappush(self._waiting, prefill)

    def end(self, request: Request, reason: FinishReason, recompute: bool) -> bool:
        """Ends a parked request. False where its blocks were lost and it is queued, to be computed once more and
        returned by a later `commit` (`recompute`: its hidden states or experts are read). Mutates.
        """
        prefill = self.parked.pop(request)
        request.finish_reason = reason
        if recompute and not prefill.is_complete:
            prefill.sampled = True
            heapq.heappush(self._waiting, prefill)
            return False
        request.blocks = prefill.drop_blocks()
        self.blocks.free(request.blocks)
        return True

    def _fits(self, need: int, prefill: Prefill) -> bool:
        """Whether `need` blocks are free for `prefill`, which parked requests that came later may lose for it. Where
        nothing is computed any of them may, or all would wait for the environments.
        """
        after = prefill.order if self.rows.requests or self._prefilling else -1
        while need > self.blocks.num_free:
            if not self._take_parked_blocks(after, prefill):
                return False
        return True

    def _take_parked_blocks(self, after: int = -1, but: Prefill | None = None) -> bool:
        """Frees the blocks of the latest arrival that is parked, or queued behind its environment's tokens, and that
        came later than order `after`. False: no such one has blocks.
        """
        holders = [p for p in (*self.parked, *self._waiting) if p.blocks and p.order > after and p is not but]
        if not holders:
            return False
        self.num_preemptions += 1
        self.blocks.free(max(holders, key=lambda p: p.order).drop_blocks())
        return True

    # Memory

    def _grow(self) -> None:
        """Allocates a block for each row whose next position opens one; preempts latest arrivals if none is free."""
        rows = self.rows
        size = self.blocks.block_size
        opens = (rows.positions[: rows.num_rows] % size == 0).nonzero()[0]
        if not opens.size:
            return
        if opens.size > self.blocks.num_free:
            opens = self._make_room(opens)
        blocks = np.array(self.blocks.allocate(opens.size), np.int32)
        rows.add_blocks(opens, blocks)
        rows.slot_mapping[opens] = blocks * size

    def _make_room(self, opens: np.ndarray) -> np.ndarray:
        """Preempts latest arrivals until each of the rows `opens` that still runs has a free block; returns these."""
        requests = [self.rows.requests[row] for row in opens]
        while sum(request.row >= 0 for request in requests) > self.blocks.num_free:
            self.preempt()
        return np.array([request.row for request in requests if request.row >= 0], np.int64)

    def preempt(self) -> None:
        """Frees all blocks of the latest arrival that holds some, a parked one first; it is recomputed later."""
        if self._take_parked_blocks():
            return
        prefill = max((*self._prefilling, *self._ready), default=None)
        latest = max(self.rows.requests, key=lambda r: r.order, default=None)
        assert prefill or latest, "memory pressure while no request holds blocks"
        self.num_preemptions += 1
        if prefill and (latest is None or prefill.order > latest.order):
            (self._ready if prefill in self._ready else self._prefilling).remove(prefill)
            self.blocks.free(prefill.drop_blocks())
        else:
            assert latest is not None
            self._leave(latest)
            prefill = Prefill(latest.computed, [latest], sampled=True)
        heapq.heappush(self._waiting, prefill)

    def _may_admit(self, prefill: Prefill) -> bool:
        promised = self.rows.num_rows + sum(len(p.children) for p in self._prefilling)
        if promised >= self.limits.max_running:
            return False
        # One block stays free for each request that may soon open one: or admitting only causes preemption.
        need = self.blocks.blocks_for(len(prefill.tokens)) - len(prefill.blocks)
        return self._fits(need + promised, prefill)

    # Prefill and fork

    def _take_chunk(self, batch: Batch, prefill: Prefill, budget: int) -> int:
        """Schedules as much of `prefill` as the budget of tokens allows; returns the rest of the budget."""
        count = max(0, min(budget, len(prefill.tokens) - prefill.done))
        if count > 0:
            batch.chunks.append(PrefillChunk(prefill, prefill.done, prefill.done + count))
        return budget - count

    def _start_children(self, batch: Batch) -> None:
        """Starts the samples of finished prompts, in order, while rows and blocks last."""
        while self._ready:
            prefill = self._ready[0]
            need = self._blocks_to_start(prefill)
            running = self.rows.num_rows
            if running >= self.limits.max_running or not self._fits(need + running, prefill):
                return
            self._start_child(prefill, batch)
            if not prefill.children:
                self._ready.pop(0)

    def _blocks_to_start(self, prefill: Prefill) -> int:
        """Blocks of the next child: the last one takes over the prompt's blocks, others copy the partly full one."""
        is_partial = len(prefill.tokens) % self.blocks.block_size != 0
        return 0 if is_partial and len(prefill.children) == 1 else 1

    def _start_child(self, prefill: Prefill, batch: Batch) -> None:
        size = self.blocks.block_size
        length = len(prefill.tokens)
        full, offset = divmod(length, size)
        request = prefill.children.pop(0)
        blocks = prefill.blocks
        if prefill.children:
            blocks = prefill.blocks[:full]
            self.blocks.share(blocks)
            if offset:
                blocks += self.blocks.allocate(1)
                batch.copies.append((prefill.blocks[full], blocks[full]))
        if not offset:
            blocks = blocks + self.blocks.allocate(1)
        self.rows.start(request, blocks, length, blocks[full] * size + offset)
        batch.started.append(request)

    # Results

    def _commit_rows(self, result: StepResult) -> list[Request]:
        rows, count = self.rows, self.rows.num_rows
        if result.counts is None:
            tokens = result.tokens[:count]
            ended = rows.advance(tokens, result.logprobs[:count])
            for request in rows.requests if rows.num_with_stops else ():
                if request.stop_strings is not None and request.stop_strings.push(tokens.item(request.row)):
                    request.finish_reason = "stop"
        else:
            ended = rows.advance_many(result.tokens, result.logprobs, result.counts, self.blocks.block_size)
        if rows.num_with_stops:
            stopped = [r.row for r in rows.requests if r.finish_reason is not None]
            ended = sorted({*ended, *stopped})
        if self._reserved:
            self._return_unused()
        return self._end(ended) if ended else []

    def _end(self, ended: list[int]) -> list[Request]:
        """Removes the rows of `ended`, a superset, whose response or turn has ended; returns the finished requests."""
        rows, finished = self.rows, []
        for row in ended:
            request = rows.requests[row]
            last = int(rows.token_ids[row])
            request.finish_reason = finish_reason(request, last, int(rows.output_len[row]))
            if request.finish_reason is not None:
                finished.append(request)
        for request in finished:
            if is_turn_end(request, int(rows.output_len[request.row])):
                cached = int(rows.positions[request.row])
                self.parked.add(request, rows.stop(request), cached)
            else:
                request.blocks = self._leave(request)
        return [request for request in finished if request.finish_reason is not None]

    def truncate(self, result: StepResult) -> None:
        """Cuts each row's run of tokens behind the first that ends the response. Mutates `result`.

        Before `commit`; without `result.counts` (a plain step) it does nothing. Tokens that plain decoding would never
        have drawn must not be emitted.
        """
        rows = self.rows
        if result.counts is None:
            return
        hits = rows.is_stop[result.tokens]
        if not rows.num_with_stops and not hits.any():
            return
        ends = np.cumsum(result.counts)
        counts = result.counts.copy()
        affected = set(np.searchsorted(ends, np.flatnonzero(hits), side="right").tolist())
        affected.update(r.row for r in rows.requests if r.stop_strings is not None)
        for row in affected:
            run = result.tokens[ends[row] - counts[row] : ends[row]].tolist()
            counts[row] = run_length(rows.requests[row], run)
        if (counts != result.counts).any():
            within = np.arange(len(result.tokens)) - np.repeat(ends - result.counts, result.counts)
            result.keep(within < np.repeat(counts, result.counts), counts)

    def _return_unused(self) -> None:
        """Frees the blocks that were reserved for tokens which were not accepted."""
        rows, size = self.rows, self.blocks.block_size
        self._reserved = False
        count = rows.num_rows
        need = -(-rows.positions[:count] // size)  # `_grow` opens the next block when it is due
        unused = rows.num_blocks[:count] > need
        for row in unused.nonzero()[0].tolist():
            self.blocks.free(rows.drop_blocks(row, need.item(row)))

    def _leave(self, request: Request) -> list[int]:
        """Removes a running request from its row and frees its blocks; returns them."""
        blocks = self.rows.stop(request)
        self.blocks.free(blocks)
        return blocks

    def _commit_chunks(self, batch: Batch, result: StepResult) -> list[Request]:
        finished: list[Request] = []
        at = batch.num_decode
        for chunk in batch.chunks:
            prefill = chunk.prefill
            prefill.done = chunk.end
            if chunk.draws:
                first, at = at, at + len(prefill.children)
                ended = draw_first(prefill, result.tokens[first:at].tolist(), result.logprobs[first:at].tolist())
                finished += self._end_first(prefill, ended)
            if prefill.is_complete:
                self._prefilling.remove(prefill)
                finished += computed_again(prefill)
                if prefill.children:
                    insort(self._ready, prefill)  # a turn that goes on may have arrived before those in here
                else:
                    self.blocks.free(prefill.blocks)
        return finished

    def _end_first(self, prefill: Prefill, ended: list[Request]) -> list[Request]:
        """Of the children `ended`, which have no row, parks those whose turn has ended; returns the finished ones."""
        for request in ended:
            if is_turn_end(request, len(request.output)):
                full = len(prefill.tokens) // self.blocks.block_size  # the last block is the siblings' to write into
                self.blocks.share(prefill.blocks[:full])
                self.parked.add(request, prefill.blocks[:full], full * self.blocks.block_size)
            else:
                request.blocks = list(prefill.blocks)
        return [request for request in ended if request.finish_reason is not None]

    def _check(self, prefill: Prefill) -> None:
        longest = max(r.params.max_tokens - len(r.output) for r in prefill.children)
        length = len(prefill.tokens)
        limits = self.limits
        name = f"prompt {prefill.children[0].prompt_id}"
        if length < 1 or longest < 1:
            raise BackendError(f"{name}: {length} prompt tokens, max_tokens {longest}: both must be at least 1")
        if length + longest > limits.max_context:
            raise BackendError(
                f"{name}: {length} prompt tokens + max_tokens {longest} = {length + longest} exceed the "
                f"context of {limits.max_context} tokens"
            )
        # Forking needs a copy of the prompt's last block while its other samples wait.
        need = self.blocks.blocks_for(length + longest) + (len(prefill.children) > 1)
        if need > self.blocks.num_blocks:
            raise BackendError(
                f"{name}: {length} prompt tokens + max_tokens {longest} need {need} KV-cache blocks of "
                f"{self.blocks.block_size} tokens, the pool has {self.blocks.num_blocks}: raise "
                "rollout.kv_cache_mib"
            )
