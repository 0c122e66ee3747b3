"""A decoding step with the production selector: its decision, seconds and emitted tokens. Torch-free.

    select -> draft -> record          the order of `rollout.speculation.speculator.Speculator`

The selector and the choice of pre-rolled tokens are production's own (`rollout.speculation`), with virtual
seconds; only the drafts are drawn (`acceptance`, `drift`), and only their costs are a model (`cost_model`).
Legend: B running rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_tlt.config.sim import SimConfig
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.speculation.pre_rollouts import LONGEST, PreRollouts
from megatron_tlt.rollout.speculation.selector import StrategySelector, build_selector
from megatron_tlt.rollout.speculation.step_costs import Expected, RowCosts
from megatron_tlt.sim.acceptance import AcceptanceModel, SimDraft
from megatron_tlt.sim.cost_model import Roofline
from megatron_tlt.sim.drift import Drift
from megatron_tlt.types import NO_DRAFT, DraftStrategy, StepMeasurement


@dataclass(slots=True)
class StepCounts:
    """Counters of decoding steps of one replica."""

    steps: int = 0
    seconds: float = 0.0
    row_steps: int = 0  # without rows whose pre-rolled response matches
    tokens: int = 0  # of these rows
    pre_rolled: int = 0  # tokens that the other rows' drafts had from there


class Speculation:
    """The decisions of one replica. Mutates its selector and counts."""

    def __init__(self, config: SimConfig, costs: Roofline, seed: tuple[int, ...]):
        section, rollout = config.rollout.speculation, config.rollout
        self._costs, self._trained = costs, section.trained
        self._rng, self._rng_of_mixed = np.random.default_rng(seed), np.random.default_rng((*seed, 1))
        self._selector: StrategySelector | None = None
        if section.drafter != "none":
            self._selector = build_selector(section)
        drafters = config.drafters
        self.acceptance = AcceptanceModel(drafters.trained if section.trained else drafters.suffix)
        self._plain_above = config.plain_above
        verified = max(rollout.verify_rows, rollout.max_running_requests * section.rows_each)
        self._earlier = MatchingRows(config, min(rollout.max_batched_tokens, verified))
        self._drift = Drift(config.pre_rollouts)
        self.counts = StepCounts()

    def set_quality(self, quality: float) -> None:
        """The trained drafter's adaptation, from now on."""
        if self._trained is not None:
            self.acceptance.quality = quality

    def step(self, running: int, cached: float, matching: int = 0) -> tuple[float, np.ndarray]:
        """Seconds of a step of `running` requests with `cached` tokens in all, and the tokens int64 [B] emitted. The
        first `matching` requests have a pre-rolled response that matches so far.
        """
        above = self._plain_above
        selector = self._selector if above is None or running <= above else None
        usual = Expected if selector is None else partial(selector.expected, running)
        pre_rolled = self._earlier.propose_for(running, matching, usual) if matching else None
        measures = pre_rolled is None or not pre_rolled.num_tokens
        strategy = NO_DRAFT
        if selector is not None:
            strategy = selector.select(running) if measures else selector.usual(running)
        draft, drafting = self._draft(strategy, running, None if measures else pre_rolled)
        emitted, rows = draft.emitted, running + int(draft.counts.sum())
        verifying = self._costs.step(running, rows, cached, rows > running)
        if selector is not None and measures:
            tokens, longest = int(emitted.sum()), min(strategy.draft_len, self._share(running, running))
            accepted = draft.accepted(longest)
            selector.record(StepMeasurement(strategy, running, rows, drafting, verifying, tokens, longest, accepted))
        if matching:
            self._earlier.record(running, rows, verifying, None if measures else 0.0)
        counts, others = self.counts, emitted[matching:]
        counts.steps += 1
        counts.seconds += drafting + verifying
        counts.row_steps += len(others)
        counts.tokens += int(others.sum())
        counts.pre_rolled += 0 if measures else int(draft.counts[:matching].sum())
        return drafting + verifying, emitted

    def _draft(self, strategy: DraftStrategy, running: int, pre_rolled: Draft | None) -> tuple[SimDraft, float]:
        """What the step verifies, and the seconds of the drafter, whose rows are those without a pre-rolled token."""
        counts, emitted = np.zeros(running, np.int64), np.ones(running, np.int64)
        rng = self._rng
        if pre_rolled is not None:
            counts[:], rng = pre_rolled.counts, self._rng_of_mixed
            emitted = self._drift.emitted(counts, rng)
        others = counts == 0
        rest = int(np.count_nonzero(others))
        if strategy.kind == "none" or not rest:
            return SimDraft(counts, emitted, 0), 0.0
        share = self._share(running + int(counts.sum()), rest)
        draft = self.acceptance.draft(strategy, np.full(rest, share), rng)
        counts[others], emitted[others] = draft.counts, draft.emitted
        seconds = self._costs.draft(strategy.kind, rest, draft.passes)
        return SimDraft(counts, emitted, draft.passes), seconds

    def _share(self, rows: int, others: int) -> int:
        """Tokens that each of `others` requests may draft, in a step that has so many `rows` without these tokens."""
        return max(0, self._earlier.most_rows - rows) // others


class MatchingRows(PreRollouts):
    """The production choice of the pre-rolled tokens that a step verifies, with acceptances from a model."""

    def __init__(self, config: SimConfig, most_rows: int):
        section = config.rollout.speculation
        self._all_rows = _Rows()
        costs = RowCosts() if section.selector == "cost_model" else None
        super().__init__(self._all_rows, most_rows, costs)
        self._acceptance = Drift(config.pre_rollouts).acceptance(LONGEST)
        self._matching = 0

    def propose_for(self, running: int, matching: int, usual: Callable[[], Expected]) -> Draft:
        """Of a step whose first `matching` of `running` rows have a place; `usual()` is expected without. Mutates."""
        self._all_rows.running, self._matching = running, matching
        return self.propose(usual)

    def follow(self) -> None:
        """No tokens are drawn here."""

    def _lengths(self) -> np.ndarray:
        return LONGEST * (np.arange(self._all_rows.running) < self._matching).astype(np.int32)

    def _draft(self, lengths: np.ndarray) -> Draft:
        acceptance = np.tile(self._acceptance, self._matching)
        return Draft(lengths, np.zeros(len(acceptance), np.int32), acceptance)


class _Rows(RunningRows):
    """As many as are set."""

    def __init__(self) -> None:
        super().__init__(1, 1, 1, 1, 1)
        self.running = 0

    @property
    def num_rows(self) -> int:
        return self.running
