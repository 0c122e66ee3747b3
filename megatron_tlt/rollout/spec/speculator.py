"""Speculation in the engine: proposes drafts and records what came of them.

    schedule -> propose (select, reserve, draft, prune) -> verify -> truncate -> record -> commit

Answers cannot depend on anything decided here (docs/numerics.md): it only chooses what the policy looks at.
Legend: B running rows, N drafted nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.rollout.batch import StepResult
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.spec.base import Drafter
from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.verify import Accepted
from megatron_tlt.types import NO_DRAFT, DraftStrategy, SpeculationStats, StepMeasurement

if TYPE_CHECKING:
    from megatron_tlt.rollout.spec.eagle import EagleDrafter
    from megatron_tlt.rollout.spec.selector import StrategySelector
    from megatron_tlt.rollout.spec.trace import DraftTrace

Reserve = Callable[[np.ndarray], np.ndarray]
Clock = Callable[[], float]
_NO_POSITIONS = np.zeros(0, np.int64)


class Speculator:
    """Proposes drafts. All ranks of a tensor-parallel group propose alike: rank 0's clock and draft decide."""

    def __init__(
        self,
        drafter: Drafter,
        selector: StrategySelector,
        rows: RunningRows,
        reserve: Reserve,
        tp: TensorParallel,
        eagle: EagleDrafter | None = None,
        clock: Clock = time.perf_counter,
    ):
        """`eagle` is the drafter, or the part of it, that is trained.
        `clock`: seconds that strategies are compared by.
        """
        self.drafter, self.eagle = drafter, eagle
        self.trace: DraftTrace | None = None  # who wants to know what was drafted for some answers
        self._counters = SpeculationCounters()
        self._rows, self._reserve, self._tp = rows, reserve, tp
        self._max_tokens = len(rows.token_ids)
        self.selector = selector
        self._clock = clock
        self._strategy = NO_DRAFT  # of the present step
        self._draft_seconds = self._proposed = 0.0  # of the present step; when its proposal was ready

    def propose(self) -> Draft | None:
        """What the next decoding step verifies; None for plain decoding. Mutates drafter, selector and block tables."""
        rows = self._rows
        last_kind = self._strategy.kind
        self._strategy = strategy = self._agree_strategy(self.selector.select(rows.num_rows))
        self._draft_seconds, draft = 0.0, None
        if strategy.kind != "none":
            started = self._clock()
            self.drafter.sync_context(rows, strategy)
            if (
                strategy.kind != last_kind
            ):  # catching up with steps of others is a cost of the switch, not of a step
                started = self._clock()
            lengths = self._reserve(self._wanted(strategy)) // strategy.topk
            draft = self._propose(rows, lengths, strategy)
        self._proposed = self._clock()
        if draft is None:
            return None
        self._draft_seconds = self._proposed - started
        return draft if draft.num_nodes else None

    def _wanted(self, strategy: DraftStrategy) -> np.ndarray:
        """Nodes int32 [B] that each row may draft: an answer's last token is never drafted but drawn."""
        rows, running = self._rows, self._rows.num_rows
        left = rows.limit[:running] - rows.output_len[:running] - 1
        share = max(0, self._max_tokens // running - 1) // strategy.topk
        return np.minimum(left, min(strategy.draft_len, share)) * strategy.topk

    def _propose(self, rows: RunningRows, lengths: np.ndarray, strategy: DraftStrategy) -> Draft:
        running = rows.num_rows
        draft = self._agree_draft(self.drafter.propose(rows, lengths, strategy))
        if draft.num_nodes:
            keep = self.selector.prune(
                strategy, running, draft.cumulative_acceptance, draft.depths, draft.counts, draft.parents
            )
            draft = draft.select(self._agree(keep) if self._tp.size > 1 else keep)
        return draft

    def record(
        self, draft: Draft | None, accepted: Accepted | None, result: StepResult, seconds: float
    ) -> None:
        """A decoding step took `seconds` and gave `result` (truncated, not yet committed).

        Mutates drafter, selector and counters.
        """
        running, strategy = self._rows.num_rows, self._strategy
        step_seconds = self._clock() - self._proposed
        fed, reached, accepted_at = running, _NO_POSITIONS, _NO_POSITIONS
        if draft is not None and accepted is not None:
            fed += draft.num_nodes
            reached = _by_position(draft.depths[accepted.reached], strategy.draft_len)
            accepted_at = _by_position(draft.depths[accepted.accepted], strategy.draft_len)
            self.drafter.observe(draft, accepted.reached, accepted.accepted)
            self._counters.step(strategy, self._draft_seconds)
            self._counters.add(draft, accepted, running, len(result.tokens), seconds)
            if self.trace is not None:
                self.trace.note(draft, accepted, self._rows)
        else:
            self._counters.plain(self._draft_seconds)
        self.selector.record(
            StepMeasurement(
                strategy,
                running,
                fed,
                self._draft_seconds,
                step_seconds,
                len(result.tokens),
                reached,
                accepted_at,
            )
        )

    def start(self, request: Request) -> None:
        """A request got its row."""
        self.drafter.start(request)
        if self.trace is not None:
            self.trace.start(request)

    def stop(self, request: Request) -> None:
        """A request is about to leave its row."""
        self.drafter.stop(request)
        if self.trace is not None:
            self.trace.stop(request)

    def end_generate(self) -> None:
        """No request is left: what was kept for siblings can go."""
        self.drafter.end_generate()

    def state_dict(self) -> dict[str, Any]:
        """What selector and calibrators have learned."""
        return {
            "drafter": self.drafter.kind,
            "selector": self.selector.state_dict(),
            "calibration": self.drafter.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict`'s, if it is of this kind of drafter."""
        if state["drafter"] == self.drafter.kind:
            self.selector.load_state_dict(state["selector"])
            self.drafter.load_state_dict(state["calibration"])

    def take_stats(self) -> SpeculationStats:
        """Counters since the last call. Resets them."""
        return self._counters.take()

    # Agreement of tensor-parallel ranks

    def _agree(self, array: np.ndarray) -> np.ndarray:
        """Rank 0's values of an array whose shape all ranks share."""
        tensor = self._tp.broadcast(torch.from_numpy(np.ascontiguousarray(array)))
        agreed: np.ndarray = tensor.numpy()
        return agreed

    def _agree_strategy(self, strategy: DraftStrategy) -> DraftStrategy:
        if self._tp.size == 1:
            return strategy
        kinds = (
            "none",
            self.drafter.kind,
            "suffix",
            "eagle",
        )  # a hybrid's strategy may name one of its parts
        numbers = np.array(
            [
                kinds.index(strategy.kind),
                strategy.draft_len,
                strategy.topk,
                strategy.num_verify_tokens,
                strategy.min_cumulative_acceptance,
            ],
            np.float64,
        )
        kind, draft_len, topk, verify, cumulative_acceptance = self._agree(numbers).tolist()
        return DraftStrategy(kinds[int(kind)], int(draft_len), int(topk), int(verify), cumulative_acceptance)

    def _agree_draft(self, draft: Draft) -> Draft:
        """Rank 0's draft. Drafts may differ in rounding, and then in size."""
        if self._tp.size == 1:
            return draft
        counts = self._agree(draft.counts)
        total = int(counts.sum())

        def column(values: np.ndarray | None, kind: type) -> np.ndarray:
            mine: np.ndarray = np.zeros(total, kind)
            if values is not None and self._tp.rank == 0:
                mine[:] = values
            return self._agree(mine)

        parents = None if draft.parents is None else column(draft.parents, np.int32)
        feature = None if draft.feature is None else column(draft.feature, np.int32)
        return Draft(
            counts,
            column(draft.tokens, np.int32),
            column(draft.cumulative_acceptance, np.float32),
            column(draft.depths, np.int32),
            parents,
            feature,
            None if draft.source is None else self._agree(draft.source),
        )


class SpeculationCounters:
    """Gathers `SpeculationStats`: notes a step at the price of an append, counts when enough notes are there."""

    def __init__(self) -> None:
        self._stats = SpeculationStats()
        self._drafts = False  # whether the last decoding step had drafted tokens
        self._plain = 0
        self._steps: dict[DraftStrategy, int] = {}
        self._notes: list[tuple[Draft, Accepted]] = []

    def plain(self, draft_seconds: float) -> None:
        """A step without drafted tokens."""
        self._plain += 1
        self._stats.draft_seconds += draft_seconds
        if self._drafts:
            self._switch(False)

    def step(self, strategy: DraftStrategy, draft_seconds: float) -> None:
        """A step with drafted tokens."""
        self._steps[strategy] = self._steps.get(strategy, 0) + 1
        self._stats.draft_seconds += draft_seconds
        if not self._drafts:
            self._switch(True)

    def _switch(self, drafts: bool) -> None:
        self._drafts = drafts
        self._stats.switches.append((time.perf_counter(), drafts))

    def add(self, draft: Draft, accepted: Accepted, running: int, emitted: int, seconds: float) -> None:
        """A step that verified `draft`."""
        stats = self._stats
        stats.row_steps += running
        stats.drafted_tokens += draft.num_nodes
        stats.emitted_tokens += emitted
        stats.verify_seconds += seconds
        batch = stats.by_batch.setdefault(running, [0, 0])
        batch[0] += running
        batch[1] += emitted
        self._notes.append((draft, accepted))
        if len(self._notes) >= 256:
            self._count()

    def take(self) -> SpeculationStats:
        """Everything since the last call. Resets."""
        if self._notes:
            self._count()
        if self._plain:
            self._steps[NO_DRAFT], self._plain = self._plain, 0
        for strategy, count in self._steps.items():
            name = strategy.name  # strategies that differ in `min_cumulative_acceptance` only share a name
            self._stats.steps_by_strategy[name] = self._stats.steps_by_strategy.get(name, 0) + count
        stats, self._stats, self._steps = self._stats, SpeculationStats(), {}
        self._drafts = False
        return stats

    def _count(self) -> None:
        """Acceptance by position, of the notes' trunks."""
        trunks = [_first_children(draft) for draft, _ in self._notes]
        drafted = np.concatenate([d.depths[t] for (d, _), t in zip(self._notes, trunks, strict=True)])
        matched = np.concatenate([d.depths[a.accepted] for d, a in self._notes])
        self._notes = []
        for record, depths in ((self._stats.drafted_at, drafted), (self._stats.accepted_at, matched)):
            counts = np.bincount(depths, minlength=int(drafted.max()) + 1)[1:].tolist()
            record.extend([0] * (len(counts) - len(record)))
            for depth, count in enumerate(counts):
                record[depth] += count


def _by_position(depths: np.ndarray, draft_len: int) -> np.ndarray:
    """Nodes at each draft position int64 [draft_len], of their depths (from 1)."""
    return np.bincount(depths, minlength=draft_len + 1)[1:]


def _first_children(draft: Draft) -> np.ndarray:
    """Bool [N]: the nodes of the trunk, which stand first in their row at index depth - 1."""
    if draft.parents is None:
        return np.ones(draft.num_nodes, bool)
    starts = np.cumsum(draft.counts) - draft.counts
    within = np.arange(draft.num_nodes) - np.repeat(starts, draft.counts)
    trunk: np.ndarray = within == draft.depths - 1
    return trunk
