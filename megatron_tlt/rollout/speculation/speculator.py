"""Speculation in the engine: proposes drafts and records their results.

    schedule -> propose (select, reserve, draft) -> verify -> truncate -> record -> commit

Where rows have a place in a pre-rolled response (`pre_rollouts`), and that pays, these draft from there, and the other
rows by the drafter's usual strategy. The selector chooses and measures all other steps.

Responses do not depend on any decision here (docs/design/numerics.md): a draft only chooses which tokens the policy is
fed.

Legend: B running rows, N drafted tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.rollout.batch import Batch, StepResult
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.speculation.base import Drafter
from megatron_tlt.rollout.speculation.counters import SpeculationCounters
from megatron_tlt.rollout.speculation.pre_rollouts import PRE_ROLLED, Choice, choose
from megatron_tlt.rollout.speculation.step_costs import LEAST_SECONDS
from megatron_tlt.rollout.speculation.trace import DraftTrace
from megatron_tlt.rollout.speculation.verify import Accepted
from megatron_tlt.types import NO_DRAFT, StepMeasurement

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.rollout.speculation.pre_rollouts import PreRolledDrafter
    from megatron_tlt.rollout.speculation.selector import StrategySelector
    from megatron_tlt.rollout.speculation.trained import TrainedDrafter

_NO_POSITIONS = np.zeros(0, np.int64)


class Speculator:
    """Proposes drafts. All ranks of a tensor-parallel group propose alike: rank 0's clock and draft decide."""

    def __init__(
        self,
        drafter: Drafter,
        selector: StrategySelector,
        rows: RunningRows,
        reserve: Callable[[np.ndarray], np.ndarray],
        tp: TensorParallel,
        pre_rollouts: PreRolledDrafter,
        trained: TrainedDrafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """`reserve`: see `Scheduler.reserve`. `trained` is the drafter where that is trained.

        `clock`: seconds that strategies are compared by.
        """
        self.drafter, self.selector, self.trained, self.pre_rollouts = drafter, selector, trained, pre_rollouts
        self.trace: DraftTrace | None = None  # drafts for some responses, for the report
        self.counters = SpeculationCounters()
        self._rows, self._reserve, self._tp, self._clock = rows, reserve, tp, clock
        self._step = Choice(NO_DRAFT)  # of the present step
        self._draft_seconds = self._own_seconds = 0.0  # of the present step; of them, for its pre-rolled part
        self._longest = 0  # tokens that each row without a pre-rolled draft had room for
        self._proposed = 0.0  # the clock when the present step's proposal was ready

    def begin(self, pre_rolled: Mapping[tuple[int, int], np.ndarray]) -> None:
        """A call with these `GenerateCall.drafts` begins, while the engine is idle. Mutates."""
        self.pre_rollouts.begin(pre_rolled)

    def end_generate(self) -> None:
        """The engine is idle: frees the state of the call. Mutates."""
        self.drafter.end_generate()
        self.pre_rollouts.end_generate()

    @property
    def has_pre_rolled(self) -> bool:
        """Whether the call has pre-rolled responses to draft from."""
        return not self.pre_rollouts.is_empty

    @property
    def _is_off(self) -> bool:
        """Whether this call can only decode plainly."""
        return self.drafter.kind == "none" and not self.has_pre_rolled

    def propose(self, batch: Batch) -> Draft | None:
        """The draft that the step of `batch` verifies; None for plain decoding, and for a batch with prefill chunks.

        Mutates drafter and block tables.
        """
        if self._is_off:
            return None
        for request in batch.started:
            self.drafter.start(request)
            if self.has_pre_rolled:
                self.pre_rollouts.start(request)
        if batch.copies and self.trained is not None:
            self.trained.copy_blocks(batch.copies)
        if not batch.is_decode:
            return None
        last_kind, started = self._step.strategy.kind, self._clock()
        pre_rollouts = self.pre_rollouts if self._tp.rank == 0 else None  # its clock and its places in responses count
        self._step = step = self._tp.broadcast_object(choose(self.selector, pre_rollouts, self._rows.num_rows))
        draft, lengths = self._reserved(step)
        self._own_seconds = 0.0 if draft is None else self._clock() - started
        self._draft_seconds = self._own_seconds
        if step.strategy.kind != "none":
            started = self._clock()
            self.drafter.sync_context(self._rows)
            if step.strategy.kind != last_kind:  # reading earlier steps' tokens is a cost of the switch
                started = self._clock()
            other = self._tp.broadcast_object(self.drafter.propose(self._rows, lengths, step.strategy))
            draft = other if draft is None else draft.join(other)
            self._draft_seconds += self._clock() - started
        self._proposed = self._clock()
        return draft if draft is not None and draft.num_tokens else None

    def _reserved(self, step: Choice) -> tuple[Draft | None, np.ndarray]:
        """The pre-rolled draft, and the most tokens of each of the drafter's rows, int32 [B]: as blocks allow.

        A response's last token is never drafted. Mutates block tables.
        """
        rows, running, pre_rolled = self._rows, self._rows.num_rows, step.pre_rolled
        counts = np.zeros(running, np.int32) if pre_rolled is None else pre_rolled.counts
        longest = np.zeros_like(counts)
        self._longest = 0
        if step.strategy.draft_len:
            self._longest = step.longest(self.pre_rollouts.most_rows, running)
            left = rows.limit[:running] - rows.output_len[:running] - 1
            longest = np.where(counts, 0, np.minimum(left, self._longest))
        if not longest.any() and pre_rolled is None:
            return None, longest
        wanted = longest + counts
        lengths = self._reserve(wanted)
        self._longest = int(lengths[(lengths < wanted) & (counts == 0)].min(initial=self._longest))
        if pre_rolled is not None:
            pre_rolled = pre_rolled.select(pre_rolled.positions < lengths[pre_rolled.row_of])
        return pre_rolled, np.where(counts, 0, lengths)

    def record(self, batch: Batch, draft: Draft | None, result: StepResult) -> None:
        """The step of `batch` gave `result`, truncated and not yet committed. Mutates drafter, selector and counters.

        Steps with prefill chunks are not measured.
        """
        if batch.chunks and self.trained is not None:
            self.trained.feed_chunks(batch)
        if not batch.is_decode or self._is_off:
            return
        step_seconds, step = max(LEAST_SECONDS, self._clock() - self._proposed), self._step
        strategy = step.strategy if step.pre_rolled is None else PRE_ROLLED
        drafted, accepted = 0, _NO_POSITIONS
        if draft is not None:
            assert result.accepted is not None
            verified, drafted = result.accepted, draft.num_tokens
            accepted = np.bincount(draft.positions[verified.accepted], minlength=strategy.draft_len)
            self._observe(draft, verified)
            if self.trace is not None:
                self.trace.add(draft, verified, self._rows)
        measurement = StepMeasurement(
            strategy,
            num_running=batch.num_decode,
            num_rows=batch.num_decode + drafted,
            draft_seconds=self._draft_seconds,
            step_seconds=step_seconds,
            num_emitted=len(result.tokens),
            longest=self._longest,
            accepted=accepted,
        )
        if step.pre_rolled is None:
            self.selector.record(measurement)
        if self.has_pre_rolled:
            own_seconds = None if step.pre_rolled is None else self._own_seconds
            self.pre_rollouts.record(batch.num_decode, measurement.num_rows, step_seconds, own_seconds)
        self.counters.add(measurement, draft)

    def _observe(self, draft: Draft, verified: Accepted) -> None:
        """The drafter learns from its own tokens of a verified draft. Mutates it, and the counters."""
        pre_rolled, reached, accepted = self._step.pre_rolled, verified.reached, verified.accepted
        if pre_rolled is None:
            self.drafter.observe(draft, reached, accepted)
            return
        was_pre_rolled = pre_rolled.counts[draft.row_of] > 0
        self.counters.add_pre_rolled(draft.select(was_pre_rolled), accepted[was_pre_rolled])
        if not was_pre_rolled.all():
            self.drafter.observe(draft.select(~was_pre_rolled), reached[~was_pre_rolled], accepted[~was_pre_rolled])

    def load_drafter(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads the trained drafter's tensors: what was measured of the former ones counts little from now on.

        Raises CheckpointError if they do not fit.
        """
        assert self.trained is not None
        self.trained.decoder.load_weights(weights)
        self.trained.weights_changed()
        self.selector.drafter_changed()

    def policy_changed(self) -> None:
        """A weight sync is complete. Mutates the selector."""
        self.selector.policy_changed()

    def start_trace(self, prompt_ids: Collection[int]) -> None:
        """Starts a new `trace`, of the drafts for responses to these prompts."""
        self.trace = DraftTrace(prompt_ids)

    def release(self) -> None:
        """Frees the drafter's cache until `resume`, after the runner's."""
        if self.trained is not None:
            self.trained.release()

    def resume(self) -> None:
        """Allocates the drafter's cache again, after the runner's."""
        if self.trained is not None:
            self.trained.resume()
