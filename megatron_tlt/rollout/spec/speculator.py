"""One place that knows drafters, selector and verifier: the engine asks it what to draft and tells it what came of it.

    schedule -> plan (selector, blocks, drafter, admission) -> verify -> truncate -> told -> commit

Answers cannot depend on anything decided here (docs/numerics.md): it only chooses what the policy looks at.
Legend: B running rows, N drafted nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.rollout.batch import StepResult
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.spec.base import Drafter
from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.selector import Rests
from megatron_tlt.rollout.spec.verify import Accepted
from megatron_tlt.types import NO_DRAFT, DraftStrategy, SpeculationStats

if TYPE_CHECKING:
    from megatron_tlt.rollout.model_runner import Verifier
    from megatron_tlt.rollout.spec.eagle import EagleDrafter
    from megatron_tlt.rollout.spec.selector import StrategySelector
    from megatron_tlt.rollout.spec.trace import DraftTrace

Reserve = Callable[[np.ndarray], np.ndarray]
Clock = Callable[[], float]
_PAUSE = 0.25  # share of a step that what follows it may have taken; beyond, the engine waited for its caller


@dataclass(slots=True)
class _Step:
    """A step that the selector has not heard of: it ends when the next one begins."""

    strategy: DraftStrategy
    rows_fed: int
    counts: np.ndarray
    draft_seconds: float
    began: float
    told: float

    def seconds(self, now: float) -> float:
        """Of all but the draft: also of schedule, commit and what the drafter learns, which drafts make dearer."""
        own = self.told - self.began
        return own + min(now - self.told, _PAUSE * own) - self.draft_seconds


class Speculator:
    """Plans speculative steps. All ranks of a tensor-parallel group plan alike: rank 0's clock and draft decide."""

    def __init__(
        self,
        drafter: Drafter,
        selector: StrategySelector,
        verifier: Verifier,
        rows: RunningRows,
        reserve: Reserve,
        tp: TensorParallel,
        eagle: EagleDrafter | None = None,
        by_position: bool = False,
        clock: Clock = time.perf_counter,
    ):
        """`eagle` is the drafter, or the part of it, that is trained.
        `by_position`: decisions must not know the drafted tokens (block verification), so survival is the mean
        acceptance at each position. `clock`: seconds that strategies are compared by.
        """
        self.drafter, self.verifier, self.eagle = drafter, verifier, eagle
        self.trace: DraftTrace | None = None  # who wants to know what was drafted for some answers
        self._counters = SpeculationCounters()
        self._rows, self._reserve, self._tp = rows, reserve, tp
        self._max_tokens = len(rows.token_ids)
        self._by_position = PositionRates() if by_position else None
        self._strategy, self._draft_seconds, self._began = NO_DRAFT, 0.0, 0.0
        self._step: _Step | None = None
        self._rests = Rests(selector, clock)
        self._clock = clock
        self._ones = np.ones(len(rows.limit), np.int32)

    @property
    def selector(self) -> StrategySelector:
        """Who decides. Another one starts without what this one granted."""
        return self._rests.selector

    @selector.setter
    def selector(self, selector: StrategySelector) -> None:
        self._rests = Rests(selector, self._clock)

    def rests(self) -> bool:
        """Whether the decoding step that begins is plain and neither planned nor told. Counts it."""
        if self._step is not None:
            self._settle(self._clock())
        if not self._rests.take(self._rows.num_rows):
            return False
        self._strategy = NO_DRAFT
        self._counters.plain(0.0)
        return True

    def plan(self) -> Draft | None:
        """What the next decoding step, which is no rest (`rests`), verifies; None for plain decoding.

        Mutates drafter, selector and block tables.
        """
        rows = self._rows
        self._began = self._clock()  # what the selector learns at times is no part of a step
        last_kind = self._strategy.kind
        strategy = self._agree_strategy(self.selector.select(rows.num_rows))
        self._strategy, self._draft_seconds = strategy, 0.0
        if strategy.kind == "none":
            if self._tp.size == 1:  # ranks' selectors agree on strategies only
                self._rests.ask(rows.num_rows)
            return None
        started = self._clock()
        self.drafter.follow(rows, strategy)
        if strategy.kind != last_kind:  # what was said while this one did not draft is no part of the step
            followed = self._clock()
            self._began, started = self._began + followed - started, followed
        lengths = self._reserve(self._wanted(strategy)) // strategy.topk
        draft = self._propose(rows, lengths, strategy)
        self._draft_seconds = self._clock() - started
        return draft if draft.num_nodes else None

    def _wanted(self, strategy: DraftStrategy) -> np.ndarray:
        """Nodes int32 [B] that each row may draft: an answer's last token is never drafted but drawn."""
        rows, running = self._rows, self._rows.num_rows
        left = rows.limit[:running] - rows.output_len[:running] - 1
        share = max(0, self._max_tokens // running - 1) // strategy.topk
        return np.minimum(left, min(strategy.draft_len, share)) * strategy.topk

    def _propose(self, rows: RunningRows, lengths: np.ndarray, strategy: DraftStrategy) -> Draft:
        running = rows.num_rows
        if self._by_position is not None:
            strategy = replace(strategy, min_survival=0.0)  # it would stop drafts by what their tokens reveal
        draft = self._agree_draft(self.drafter.propose(rows, lengths, strategy))
        if self._by_position is not None:
            draft.survival = self._by_position.survival(draft.depths)
        if draft.num_nodes:
            keep = self.selector.admit(
                strategy, running, draft.survival, draft.depths, draft.counts, draft.parents
            )
            draft = draft.select(self._agree(keep) if self._tp.size > 1 else keep)
        return draft

    def told(
        self, draft: Draft | None, accepted: Accepted | None, result: StepResult, seconds: float
    ) -> None:
        """A decoding step took `seconds` and gave `result` (truncated, not yet committed).

        Mutates drafter, selector and counters.
        """
        running, strategy = self._rows.num_rows, self._strategy
        counts, fed = result.counts, running
        if counts is None:
            counts = self._ones[:running]
        if draft is not None and accepted is not None:
            fed += draft.num_nodes
            self.drafter.observe(draft, accepted.reached, accepted.accepted)
            if self._by_position is not None:
                self._by_position.observe(draft.depths, accepted.reached, accepted.accepted)
            self._counters.step(strategy, self._draft_seconds)
            self._counters.add(draft, accepted, running, len(result.tokens), seconds)
            if self.trace is not None:
                self.trace.note(draft, accepted, self._rows)
        else:
            self._counters.plain(self._draft_seconds)
        self._step = _Step(strategy, fed, counts, self._draft_seconds, self._began, self._clock())

    def pause(self) -> None:
        """A step with prefill chunks begins: it is nobody's to learn from."""
        self._settle()
        self._rests.end()

    def _settle(self, now: float | None = None) -> None:
        """Tells the selector of the last step, which ended `now`, or when `told` did."""
        step = self._step
        if step is not None:
            self._step = None
            seconds = step.seconds(step.told if now is None else now)
            running = len(step.counts)
            self.selector.observe(
                step.strategy, running, step.rows_fed, step.counts, step.draft_seconds, seconds
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
        self.pause()
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
            self._rests.forget()
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
                strategy.min_survival,
            ],
            np.float64,
        )
        kind, draft_len, topk, verify, survival = self._agree(numbers).tolist()
        return DraftStrategy(kinds[int(kind)], int(draft_len), int(topk), int(verify), survival)

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
        probs = draft.probs
        if probs is not None:
            probs = np.zeros((total, probs.shape[1]), np.float32)
            if self._tp.rank == 0:
                assert draft.probs is not None
                probs[:] = draft.probs
            probs = self._agree(probs)
        return Draft(
            counts,
            column(draft.tokens, np.int32),
            column(draft.survival, np.float32),
            column(draft.depths, np.int32),
            parents,
            feature,
            probs,
            None if draft.source is None else self._agree(draft.source),
        )


class PositionRates:
    """Mean acceptance at each draft position, whatever the tokens: what block verification may decide by.

    Pruning by anything that a drafted token reveals would bias what is emitted (facts of speculation, section 2;
    DSpark, appendix A).
    """

    def __init__(self, depths: int = 64, prior: float = 0.6, weight: float = 20.0, memory: float = 0.999):
        self._tried = np.full(depths, weight)
        self._matched = np.full(depths, weight * prior)
        self._memory = memory

    def survival(self, depths: np.ndarray) -> np.ndarray:
        """Estimated probability float32 [N] that a node at these depths (from 1) is emitted."""
        reach = np.cumprod(self._matched / self._tried).astype(np.float32)
        chosen: np.ndarray = reach[depths - 1]
        return chosen

    def observe(self, depths: np.ndarray, reached: np.ndarray, accepted: np.ndarray) -> None:
        """Counts verdicts; old ones fade."""
        size = len(self._tried)
        self._tried = self._tried * self._memory + np.bincount(depths[reached] - 1, minlength=size)
        self._matched = self._matched * self._memory + np.bincount(depths[accepted] - 1, minlength=size)


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
        self._notes.append((replace(draft, probs=None), accepted))  # distributions are large
        if len(self._notes) >= 256:
            self._count()

    def take(self) -> SpeculationStats:
        """Everything since the last call. Resets."""
        if self._notes:
            self._count()
        if self._plain:
            self._steps[NO_DRAFT], self._plain = self._plain, 0
        for strategy, count in self._steps.items():
            name = strategy.name  # strategies that differ in `min_survival` only share a name
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


def _first_children(draft: Draft) -> np.ndarray:
    """Bool [N]: the nodes of the trunk, which stand first in their row at index depth - 1."""
    if draft.parents is None:
        return np.ones(draft.num_nodes, bool)
    starts = np.cumsum(draft.counts) - draft.counts
    within = np.arange(draft.num_nodes) - np.repeat(starts, draft.counts)
    trunk: np.ndarray = within == draft.depths - 1
    return trunk
