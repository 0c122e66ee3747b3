"""Speculation in the engine: proposes drafts and records their results.

    schedule -> propose (select, reserve, draft) -> verify -> truncate -> record -> commit

Responses do not depend on any decision here (docs/design/numerics.md): a draft only chooses which tokens the policy is
fed.

Legend: B running rows, N drafted tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.models.draft import Draft
from megatron_tlt.rollout.batch import Batch, StepResult
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.spec.base import Drafter
from megatron_tlt.rollout.spec.counters import SpeculationCounters
from megatron_tlt.rollout.spec.trace import DraftTrace
from megatron_tlt.types import NO_DRAFT, DraftStrategy, StepMeasurement

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.rollout.spec.selector import StrategySelector
    from megatron_tlt.rollout.spec.trained import TrainedDrafter

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
        trained: TrainedDrafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """`reserve`: see `Scheduler.reserve`. `trained` is the drafter where that is trained.

        `clock`: seconds that strategies are compared by.
        """
        self.drafter, self.selector, self.trained = drafter, selector, trained
        self.trace: DraftTrace | None = None  # drafts for some responses, for the report
        self.counters = SpeculationCounters()
        self._rows, self._reserve, self._tp, self._clock = rows, reserve, tp, clock
        self._max_tokens = len(rows.token_ids)
        self._strategy = NO_DRAFT  # of the present step
        self._draft_seconds = 0.0  # of the present step
        self._proposed = 0.0  # the clock when the present step's proposal was ready

    def propose(self, batch: Batch) -> Draft | None:
        """The draft that the step of `batch` verifies; None for plain decoding, and for a batch with prefill chunks.

        Mutates drafter and block tables.
        """
        for request in batch.started:
            self.drafter.start(request)
        if batch.copies and self.trained is not None:
            self.trained.copy_blocks(batch.copies)
        if not batch.is_decode:
            return None
        rows, last_kind = self._rows, self._strategy.kind
        self._strategy = strategy = self._tp.broadcast_object(self.selector.select(rows.num_rows))
        self._draft_seconds, draft = 0.0, None
        if strategy.kind != "none":
            started = self._clock()
            self.drafter.sync_context(rows)
            if strategy.kind != last_kind:  # reading the tokens of earlier steps is a cost of the switch, not of a step
                started = self._clock()
            draft = self._tp.broadcast_object(self.drafter.propose(rows, self._lengths(strategy), strategy))
            draft = draft.likely(strategy.min_cumulative_acceptance) if draft.num_tokens else None
            self._draft_seconds = self._clock() - started
        self._proposed = self._clock()
        return draft if draft is not None and draft.num_tokens else None

    def _lengths(self, strategy: DraftStrategy) -> np.ndarray:
        """Most tokens of each row's draft, for which blocks are reserved. A response's last token is never drafted."""
        rows, running = self._rows, self._rows.num_rows
        left = rows.limit[:running] - rows.output_len[:running] - 1
        share = max(0, self._max_tokens // running - 1)
        return self._reserve(np.minimum(left, min(strategy.draft_len, share)))

    def record(self, batch: Batch, draft: Draft | None, result: StepResult) -> None:
        """The step of `batch` gave `result`, truncated and not yet committed. Mutates drafter, selector and counters.

        Steps with prefill chunks are not measured.
        """
        if batch.chunks and self.trained is not None:
            self.trained.feed_chunks(batch)
        if not batch.is_decode:
            return
        step_seconds = self._clock() - self._proposed
        drafted, reached, accepted = 0, _NO_POSITIONS, _NO_POSITIONS
        if draft is not None:
            assert result.accepted is not None
            verified, longest = result.accepted, self._strategy.draft_len
            drafted, at = draft.num_tokens, draft.positions
            reached = np.bincount(at[verified.reached], minlength=longest)
            accepted = np.bincount(at[verified.accepted], minlength=longest)
            self.drafter.observe(draft, verified.reached, verified.accepted)
            if self.trace is not None:
                self.trace.add(draft, verified, self._rows)
        measurement = StepMeasurement(
            self._strategy,
            num_running=batch.num_decode,
            num_rows=batch.num_decode + drafted,
            draft_seconds=self._draft_seconds,
            step_seconds=step_seconds,
            num_emitted=len(result.tokens),
            reached=reached,
            accepted=accepted,
        )
        self.selector.record(measurement)
        self.counters.add(measurement, draft)

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
        """State of selector and calibration."""
        return {
            "drafter": self.drafter.kind,
            "selector": self.selector.state_dict(),
            "calibration": self.drafter.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`, if it is of this kind of drafter."""
        if state["drafter"] == self.drafter.kind:
            self.selector.load_state_dict(state["selector"])
            self.drafter.load_state_dict(state["calibration"])
