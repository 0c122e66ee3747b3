"""A decoding step with the production selector: its decision, seconds and emitted tokens. Torch-free.

    select -> draft -> record          the order of `rollout.spec.speculator.Speculator`

The selector is `rollout.spec.selector.build_selector`'s own, with virtual seconds; only the drafts are drawn
(`acceptance`), and only their costs are a model (`cost_model`). Legend: B running rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from megatron_tlt.config.sim import SimConfig
from megatron_tlt.rollout.spec.selector import StrategySelector, build_selector
from megatron_tlt.sim.acceptance import AcceptanceModel
from megatron_tlt.sim.cost_model import CostModel
from megatron_tlt.types import NO_DRAFT, DraftStrategy, StepMeasurement

_NONE = np.zeros(0, np.int64)


@dataclass(slots=True)
class StepCounts:
    """Counters of decoding steps of one replica."""

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
    """The selector of one replica, or none. Mutates its selector and counts."""

    def __init__(self, config: SimConfig, costs: CostModel, seed: tuple[int, ...]):
        section = config.rollout.speculation
        self._costs, self._trained = costs, section.trained
        self._rng = np.random.default_rng(seed)
        self._selector: StrategySelector | None = None
        if section.drafter != "none":
            self._selector = build_selector(section)
        drafters = config.drafters
        self.acceptance = AcceptanceModel(drafters.trained if section.trained else drafters.suffix)
        self._plain_above = config.plain_above
        self._most_rows = config.rollout.max_batched_tokens
        self.counts = StepCounts()

    def set_quality(self, quality: float) -> None:
        """The trained drafter's adaptation, from now on."""
        if self._trained is not None:
            self.acceptance.quality = quality

    def step(self, running: int, cached: float) -> tuple[float, np.ndarray]:
        """Seconds of a step of `running` requests with `cached` tokens in all, and the tokens int64 [B] emitted."""
        above = self._plain_above
        selector = self._selector if above is None or running <= above else None
        strategy = NO_DRAFT if selector is None else selector.select(running)
        if selector is not None and strategy.kind != "none":
            return self._draft(selector, strategy, running, cached)
        seconds = self._costs.step(running, running, cached, False)
        emitted = np.ones(running, np.int64)
        if selector is not None:
            selector.record(StepMeasurement(NO_DRAFT, running, running, 0.0, seconds, running, _NONE, _NONE))
        self._count("none", seconds, running, emitted, False)
        return seconds, emitted

    def _draft(
        self, selector: StrategySelector, strategy: DraftStrategy, running: int, cached: float
    ) -> tuple[float, np.ndarray]:
        share = max(0, self._most_rows // running - 1)
        lengths = np.full(running, min(strategy.draft_len, share), np.int64)
        draft = self.acceptance.draft(strategy, lengths, self._rng)
        drafted = int(draft.counts.sum())
        passes = draft.passes if self._trained is None else self._trained.passes(draft.passes)
        drafting = self._costs.draft(strategy.kind, running, passes, drafted)
        emitted, fed = draft.emitted, running + drafted
        reached, accepted = draft.reached(strategy.draft_len), draft.accepted(strategy.draft_len)
        verifying = self._costs.step(running, fed, cached, fed > running)
        tokens = int(emitted.sum())
        selector.record(
            StepMeasurement(strategy, running, fed, drafting, verifying, tokens, reached, accepted)
        )
        self._count(strategy.name, drafting + verifying, running, emitted, True)
        return drafting + verifying, emitted

    def _count(self, name: str, seconds: float, running: int, emitted: np.ndarray, drafted: bool) -> None:
        counts = self.counts
        tokens = int(emitted.sum())
        counts.steps[name] += 1
        counts.seconds += seconds
        counts.row_steps += running
        counts.tokens += tokens
        if drafted:
            counts.draft_seconds += seconds
            counts.draft_rows += running
            counts.draft_tokens += tokens
