"""A decoding step with the production selector: what it decides, what that costs, what comes out. Torch-free.

    select -> draft -> prune -> record          the order of `rollout.spec.speculator.Speculator`

The selector is `rollout.spec.selector.build_selector`'s own, told virtual seconds; only the drafts are drawn
(`acceptance`), and only their costs are a model (`cost_model`). Legend: B running rows, N drafted nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from megatron_tlt.config.sim import SimConfig
from megatron_tlt.rollout.spec.draft import prune
from megatron_tlt.rollout.spec.selector import StrategySelector, build_selector
from megatron_tlt.sim.acceptance import Acceptance
from megatron_tlt.sim.cost_model import CostModel
from megatron_tlt.types import NO_DRAFT, DraftStrategy, StepMeasurement

Reserve = Callable[[np.ndarray], np.ndarray]
_NONE = np.zeros(0, np.int64)


@dataclass(slots=True)
class Tally:
    """What decoding steps of one replica amounted to."""

    steps: Counter[str] = field(default_factory=Counter)  # by strategy
    seconds: float = 0.0
    row_steps: int = 0
    tokens: int = 0
    draft_seconds: float = 0.0  # of steps with drafts
    draft_rows: int = 0
    draft_tokens: int = 0

    @property
    def accept_length(self) -> float:
        """Mean tokens of a row in a step that drafted; 0: none did."""
        return self.draft_tokens / self.draft_rows if self.draft_rows else 0.0

    @property
    def speculating(self) -> float:
        """Share of the seconds that were steps with drafts."""
        return self.draft_seconds / self.seconds if self.seconds else 0.0


class Speculation:
    """The selector of one replica, or none. Mutates its selector and tally."""

    def __init__(self, config: SimConfig, costs: CostModel, seed: tuple[int, ...]):
        section = config.rollout.speculation
        self._costs, self._section = costs, section
        self._rng = np.random.default_rng(seed)
        self._selector: StrategySelector | None = None
        if section.drafter != "none":
            self._selector = build_selector(section, section.drafter)
        self.acceptance = {
            kind: Acceptance(getattr(config.drafters, kind)) for kind in ("suffix", "eagle", "hybrid")
        }
        self._plain_above = config.plain_above
        self._most_rows = config.rollout.max_batched_tokens
        self.tally = Tally()

    def set_quality(self, quality: float) -> None:
        """The trained drafter's adaptation, from now on. A hybrid's trained part is its better half: it moves too."""
        for kind in ("eagle", "hybrid"):
            self.acceptance[kind].quality = quality

    def step(
        self, running: int, cached: float, left: np.ndarray | None = None, reserve: Reserve | None = None
    ) -> tuple[float, np.ndarray]:
        """Seconds of a step of `running` requests with `cached` tokens in all, and the tokens int64 [B] emitted.

        `left` int [B]: tokens each request may still draw; `reserve`: `Scheduler.reserve`. None: no limit.
        """
        strategy = self._select(running)
        if strategy.kind == "none" or self._selector is None:
            seconds = self._costs.step(running, running, cached, False)
            emitted = np.ones(running, np.int64)
            if self._selector is not None and not self._is_above(running):
                measured = StepMeasurement(NO_DRAFT, running, running, 0.0, seconds, running, _NONE, _NONE)
                self._selector.record(measured)
            self._count("none", seconds, running, emitted, False)
            return seconds, emitted
        return self._draft(strategy, running, cached, left, reserve)

    def _select(self, running: int) -> DraftStrategy:
        """The selector's strategy; plain decoding without one and above `plain_above`."""
        if self._selector is None or self._is_above(running):
            return NO_DRAFT
        return self._selector.select(running)

    def _is_above(self, running: int) -> bool:
        return self._plain_above is not None and running > self._plain_above

    def _draft(
        self,
        strategy: DraftStrategy,
        running: int,
        cached: float,
        left: np.ndarray | None,
        reserve: Reserve | None,
    ) -> tuple[float, np.ndarray]:
        assert self._selector is not None
        share = max(0, self._most_rows // running - 1) // strategy.topk
        lengths = np.full(running, min(strategy.draft_len, share), np.int64)
        if left is not None:
            lengths = np.minimum(lengths, left - 1)
        if reserve is not None:
            lengths = reserve((lengths * strategy.topk).astype(np.int32)) // strategy.topk
        draft = self.acceptance[strategy.kind].draft(strategy, lengths, self._rng)
        drafting = self._costs.draft(strategy.kind, running, draft.passes, draft.num_nodes)
        emitted, fed = np.ones(running, np.int64), running
        reached = accepted = np.zeros(strategy.draft_len, np.int64)
        if draft.num_nodes:
            keep = prune(strategy, draft.cumulative_acceptance, draft.counts)
            fed += int(np.count_nonzero(keep))
            emitted = draft.emitted(keep)
            reached, accepted = draft.by_position(keep, emitted, strategy.draft_len)
        verifying = self._costs.step(running, fed, cached, fed > running)
        tokens = int(emitted.sum())
        self._selector.record(
            StepMeasurement(strategy, running, fed, drafting, verifying, tokens, reached, accepted)
        )
        self._count(strategy.name, drafting + verifying, running, emitted, True)
        return drafting + verifying, emitted

    def _count(self, name: str, seconds: float, running: int, emitted: np.ndarray, drafted: bool) -> None:
        tally, tokens = self.tally, int(emitted.sum())
        tally.steps[name] += 1
        tally.seconds += seconds
        tally.row_steps += running
        tally.tokens += tokens
        if drafted:
            tally.draft_seconds += seconds
            tally.draft_rows += running
            tally.draft_tokens += tokens
