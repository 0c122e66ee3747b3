"""A decoding step with the production selector: its decision, seconds and emitted tokens. Torch-free.

    choose -> draft -> record          the order of `rollout.speculation.speculator.Speculator`

The selector and the choice of pre-rolled tokens are production's own (`rollout.speculation`), with virtual
seconds; only the drafts are drawn (`acceptance`, `drift`), and only their costs are a model (`cost_model`).
Legend: B running rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_tlt.config.sim import SimConfig
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.speculation.pre_rollouts import LONGEST, Choice, PreRolledDrafter, choose
from megatron_tlt.rollout.speculation.selector import FixedSelector, build_selector
from megatron_tlt.sim.acceptance import AcceptanceModel, SimDraft
from megatron_tlt.sim.cost_model import Roofline
from megatron_tlt.sim.drift import Drift
from megatron_tlt.types import NO_DRAFT, StepMeasurement

_PLAIN = FixedSelector(NO_DRAFT)


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
        self._selector = build_selector(section)
        drafters = config.drafters
        self.acceptance = AcceptanceModel(drafters.trained if section.trained else drafters.suffix)
        self._plain_above = config.plain_above
        self._drift = Drift(config.pre_rollouts)
        sizes = rollout.max_batched_tokens, rollout.verify_rows, rollout.max_running_requests
        self._rows = _Rows()
        self._pre_rollouts = MatchingRows.of(section, self._rows, *sizes)
        self._pre_rollouts.acceptance = self._drift.acceptance(LONGEST)
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
        selector = self._selector if above is None or running <= above else _PLAIN
        self._rows.running, self._pre_rollouts.matching = running, matching
        choice = choose(selector, self._pre_rollouts, running)
        measures, strategy = choice.pre_rolled is None, choice.strategy
        draft, drafting = self._draft(choice, running)
        emitted, rows = draft.emitted, running + int(draft.counts.sum())
        verifying = self._costs.step(running, rows, cached, rows > running)
        if measures:
            tokens, longest = int(emitted.sum()), choice.longest(self._pre_rollouts.most_rows, running)
            accepted = draft.accepted(longest)
            selector.record(StepMeasurement(strategy, running, rows, drafting, verifying, tokens, longest, accepted))
        if matching:
            self._pre_rollouts.record(running, rows, verifying, None if measures else 0.0)
        counts, others = self.counts, emitted[matching:]
        counts.steps += 1
        counts.seconds += drafting + verifying
        counts.row_steps += len(others)
        counts.tokens += int(others.sum())
        counts.pre_rolled += 0 if measures else int(draft.counts[:matching].sum())
        return drafting + verifying, emitted

    def _draft(self, choice: Choice, running: int) -> tuple[SimDraft, float]:
        """What the step verifies, and the seconds of the drafter, whose rows are those without a pre-rolled token."""
        strategy, pre_rolled = choice
        counts, emitted = np.zeros(running, np.int64), np.ones(running, np.int64)
        rng = self._rng
        if pre_rolled is not None:
            counts[:], rng = pre_rolled.counts, self._rng_of_mixed
            emitted = self._drift.emitted(counts, rng)
        others = counts == 0
        rest = int(np.count_nonzero(others))
        if strategy.kind == "none" or not rest:
            return SimDraft(counts, emitted, 0), 0.0
        longest = choice.longest(self._pre_rollouts.most_rows, running)
        draft = self.acceptance.draft(strategy, np.full(rest, longest), rng)
        counts[others], emitted[others] = draft.counts, draft.emitted
        seconds = self._costs.draft(strategy.kind, rest, draft.passes)
        return SimDraft(counts, emitted, draft.passes), seconds


class MatchingRows(PreRolledDrafter):
    """The production choice of the pre-rolled tokens that a step verifies, with acceptances from a model."""

    acceptance: np.ndarray  # float32 [LONGEST], cumulative, of a matching response's next tokens
    matching = 0  # rows of the step, its first ones, that have a place

    @property
    def is_empty(self) -> bool:
        return not self.matching

    def follow(self) -> None:
        """No tokens are drawn here."""

    def _lengths(self) -> np.ndarray:
        return LONGEST * (np.arange(self._rows.num_rows) < self.matching).astype(np.int32)

    def _draft(self, lengths: np.ndarray) -> Draft:
        acceptance = np.tile(self.acceptance, self.matching)
        return Draft(lengths, np.zeros(len(acceptance), np.int32), acceptance)


class _Rows(RunningRows):
    """As many as are set."""

    def __init__(self) -> None:
        super().__init__(1, 1, 1, 1, 1)
        self.running = 0

    @property
    def num_rows(self) -> int:
        return self.running
