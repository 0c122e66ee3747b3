"""Speculation in the engine: proposes drafts and records their results.

    schedule -> propose (select, reserve, draft) -> verify -> truncate -> record -> commit

Where rows have a place in an earlier response (`pre_rollouts`) these draft from there, by a selector of such steps, and
the other rows by the drafter.

Responses do not depend on any decision here (docs/design/numerics.md): a draft only chooses which tokens the policy is
fed.

Legend: B running rows, N drafted tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.models.draft import Draft
from megatron_tlt.rollout.batch import Batch, StepResult
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.spec.base import Drafter
from megatron_tlt.rollout.spec.counters import SpeculationCounters
from megatron_tlt.rollout.spec.trace import DraftTrace
from megatron_tlt.rollout.spec.verify import Accepted
from megatron_tlt.types import NO_DRAFT, DraftStrategy, StepMeasurement

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.rollout.spec.pre_rollouts import PreRollouts
    from megatron_tlt.rollout.spec.selector import StrategySelector
    from megatron_tlt.rollout.spec.trained import TrainedDrafter

_NO_POSITIONS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Step:
    """How a step drafts."""

    strategy: DraftStrategy  # that is measured
    by_drafter: DraftStrategy  # of the drafter's rows
    # Int32 [B], most tokens that a row drafts from its earlier response; 0: it is the drafter's. None: all are.
    pre_rolled: np.ndarray | None = None


_PLAIN = _Step(NO_DRAFT, NO_DRAFT)


class Speculator:
    """Proposes drafts. All ranks of a tensor-parallel group propose alike: rank 0's clock and draft decide."""

    def __init__(
        self,
        drafter: Drafter,
        selector: StrategySelector,
        rows: RunningRows,
        reserve: Callable[[np.ndarray], np.ndarray],
        tp: TensorParallel,
        trained: TrainedDrafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
        pre_rollouts: PreRollouts | None = None,
    ):
        """`reserve`: see `Scheduler.reserve`. `trained` is the drafter where that is trained.

        `clock`: seconds that strategies are compared by.
        """
        self.drafter, self.selector, self.trained = drafter, selector, trained
        self.pre_rollouts = pre_rollouts
        self.trace: DraftTrace | None = None  # drafts for some responses, for the report
        self.counters = SpeculationCounters()
        self._rows, self._reserve, self._tp, self._clock = rows, reserve, tp, clock
        self._max_tokens = len(rows.token_ids)
        self._step = _PLAIN  # the present one
        self._draft_seconds = 0.0  # of the present step
        self._proposed = 0.0  # the clock when the present step's proposal was ready

    def begin(self, earlier: Mapping[tuple[int, int], np.ndarray]) -> None:
        """A call with these `GenerateCall.drafts` begins, while the engine is idle. Mutates."""
        if self.pre_rollouts is not None:
            self.pre_rollouts.begin(earlier)

    def end_generate(self) -> None:
        """The engine is idle: frees the state of the call. Mutates."""
        self.drafter.end_generate()
        if self.pre_rollouts is not None:
            self.pre_rollouts.end_generate()

    @property
    def _earlier(self) -> PreRollouts | None:
        """The earlier responses, where the call has any."""
        return None if self.pre_rollouts is None or self.pre_rollouts.is_empty else self.pre_rollouts

    @property
    def _is_off(self) -> bool:
        """Whether this call can only decode plainly."""
        return self.drafter.kind == "none" and self._earlier is None

    def propose(self, batch: Batch) -> Draft | None:
        """The draft that the step of `batch` verifies; None for plain decoding, and for a batch with prefill chunks.

        Mutates drafter and block tables.
        """
        if self._is_off:
            return None
        for request in batch.started:
            self.drafter.start(request)
            if self._earlier is not None:
                self._earlier.start(request)
        if batch.copies and self.trained is not None:
            self.trained.copy_blocks(batch.copies)
        if not batch.is_decode:
            return None
        rows, last_kind = self._rows, self._step.by_drafter.kind
        chosen, self._draft_seconds, draft = self._choose(), 0.0, None
        self._step = step = self._tp.broadcast_object(chosen)
        if step.strategy.kind != "none":
            started = self._clock()
            if step.by_drafter.kind != "none":
                self.drafter.sync_context(rows)
                if step.by_drafter.kind != last_kind:  # reading earlier steps' tokens is a cost of the switch
                    started = self._clock()
            draft = self._tp.broadcast_object(self._draft(step))
            draft = draft.likely(step.strategy.min_cumulative_acceptance) if draft.num_tokens else None
            self._draft_seconds = self._clock() - started
        self._proposed = self._clock()
        return draft if draft is not None and draft.num_tokens else None

    def _choose(self) -> _Step:
        """How the present step drafts, on rank 0. Mutates the places in earlier responses."""
        running, earlier = self._rows.num_rows, self._earlier
        if earlier is not None and self._tp.rank == 0:
            strategy = earlier.selector.select(running)
            pre_rolled = earlier.lengths(strategy)
            if pre_rolled.any():
                other = NO_DRAFT if strategy.kind == "none" else self.selector.usual(running)
                if other.kind != "none":
                    length = min(other.draft_len, strategy.draft_len)
                    least = max(other.min_cumulative_acceptance, strategy.min_cumulative_acceptance)
                    other = DraftStrategy(other.kind, length, least)
                return _Step(strategy, other, pre_rolled)
        strategy = self.selector.select(running)
        return _Step(strategy, strategy)

    def _draft(self, step: _Step) -> Draft:
        """The drafts of both sources, before rows are weighed against each other. Those of rank 0 count."""
        rows, lengths = self._rows, self._lengths(step)
        if step.pre_rolled is None:
            return self.drafter.propose(rows, lengths, step.by_drafter)
        assert self.pre_rollouts is not None
        at, draft = step.pre_rolled > 0, Draft.empty(rows.num_rows)
        if self._tp.rank == 0:
            draft = self.pre_rollouts.propose(np.where(at, lengths, np.int32(0)))
        if step.by_drafter.kind == "none" or at.all():
            return draft
        other = self.drafter.propose(rows, np.where(at, np.int32(0), lengths), step.by_drafter)
        return draft.join(other.likely(step.by_drafter.min_cumulative_acceptance))

    def _lengths(self, step: _Step) -> np.ndarray:
        """Most tokens of each row's draft, for which blocks are reserved. A response's last token is never drafted."""
        rows, running = self._rows, self._rows.num_rows
        left = rows.limit[:running] - rows.output_len[:running] - 1
        if step.pre_rolled is None:
            share = max(0, self._max_tokens // running - 1)
            return self._reserve(np.minimum(left, min(step.strategy.draft_len, share)))
        assert self.pre_rollouts is not None
        longest = np.where(step.pre_rolled > 0, step.pre_rolled, np.int32(step.by_drafter.draft_len))
        share = max(0, self.pre_rollouts.most_rows - running) // max(1, int(np.count_nonzero(longest)))
        return self._reserve(np.minimum(left, np.minimum(longest, share)))

    def record(self, batch: Batch, draft: Draft | None, result: StepResult) -> None:
        """The step of `batch` gave `result`, truncated and not yet committed. Mutates drafter, selector and counters.

        Steps with prefill chunks are not measured.
        """
        if batch.chunks and self.trained is not None:
            self.trained.feed_chunks(batch)
        if not batch.is_decode or self._is_off:
            return
        step_seconds, step = self._clock() - self._proposed, self._step
        drafted, reached, accepted = 0, _NO_POSITIONS, _NO_POSITIONS
        if draft is not None:
            assert result.accepted is not None
            verified, longest = result.accepted, step.strategy.draft_len
            drafted, at = draft.num_tokens, draft.positions
            reached = np.bincount(at[verified.reached], minlength=longest)
            accepted = np.bincount(at[verified.accepted], minlength=longest)
            self._observe(draft, verified)
            if self.trace is not None:
                self.trace.add(draft, verified, self._rows)
        measurement = StepMeasurement(
            step.strategy,
            num_running=batch.num_decode,
            num_rows=batch.num_decode + drafted,
            draft_seconds=self._draft_seconds,
            step_seconds=step_seconds,
            num_emitted=len(result.tokens),
            reached=reached,
            accepted=accepted,
        )
        if step.pre_rolled is None:
            self.selector.record(measurement)
        else:
            assert self.pre_rollouts is not None
            self.pre_rollouts.selector.record(measurement)
        self.counters.add(measurement, draft)

    def _observe(self, draft: Draft, verified: Accepted) -> None:
        """The drafter learns from its own tokens of a verified draft. Mutates it, and the counters."""
        at, reached, accepted = self._step.pre_rolled, verified.reached, verified.accepted
        if at is None:
            self.drafter.observe(draft, reached, accepted)
            return
        is_earlier = at[draft.row_of] > 0
        self.counters.add_pre_rolled(draft.select(is_earlier), accepted[is_earlier])
        if not is_earlier.all():
            self.drafter.observe(draft.select(~is_earlier), reached[~is_earlier], accepted[~is_earlier])

    def load_drafter(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads the trained drafter's tensors: what was measured of the former ones counts little from now on.

        Raises CheckpointError if they do not fit.
        """
        assert self.trained is not None
        self.trained.decoder.load_weights(weights)
        self.trained.weights_changed()
        self.selector.drafter_changed()

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

    def state_dict(self) -> dict[str, Any]:
        """State of selectors and calibrations."""
        state = {
            "drafter": self.drafter.kind,
            "selector": self.selector.state_dict(),
            "calibration": self.drafter.state_dict(),
        }
        return state if self.pre_rollouts is None else state | {"pre_rollouts": self.pre_rollouts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`, if it is of this kind of drafter; that of pre-rollouts, where there is one."""
        if state["drafter"] == self.drafter.kind:
            self.selector.load_state_dict(state["selector"])
            self.drafter.load_state_dict(state["calibration"])
        if self.pre_rollouts is not None and "pre_rollouts" in state:
            self.pre_rollouts.load_state_dict(state["pre_rollouts"])
