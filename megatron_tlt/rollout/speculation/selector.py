"""The interface of strategy selectors, the fixed one, and the configured one.

A selector chooses how each decoding step speculates. Losslessness does not depend on it: the emitted tokens are those
of plain decoding, whatever was drafted. Torch-free and without a clock: seconds come in as arguments.
"""

from __future__ import annotations

from typing import Protocol

from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.rollout.speculation.bandit import BucketedEpsilonGreedy
from megatron_tlt.rollout.speculation.cost_model_selector import CostModelSelector
from megatron_tlt.rollout.speculation.step_costs import Expected
from megatron_tlt.types import NO_DRAFT, DraftStrategy, StepMeasurement


class StrategySelector(Protocol):
    """Called once before and once after every decoding step; steps with prefill are neither selected nor recorded.

    On tensor-parallel ranks other than the first `record` may be about a strategy that rank 0 selected.
    """

    def select(self, num_running: int) -> DraftStrategy:
        """The strategy for a step of `num_running` >= 1 requests; `NO_DRAFT` for plain decoding."""

    def usual(self, num_running: int) -> DraftStrategy:
        """The strategy of such a step where it is no trial: nothing will be recorded. By default as `select`."""
        return self.select(num_running)

    def expected(self, num_running: int) -> Expected:
        """Of a step by `usual`. By default, and before anything was measured: as of plain decoding."""
        return Expected()

    def record(self, measurement: StepMeasurement) -> None:
        """Adds one measured decoding step. Mutates the selector; by default nothing is kept."""
        return

    def drafter_changed(self) -> None:
        """The trained drafter has new weights: its acceptance so far is another's. By default nothing changes."""
        return

    def policy_changed(self) -> None:
        """A weight sync is complete. By default nothing changes."""
        return


class FixedSelector(StrategySelector):
    """Always the same strategy."""

    def __init__(self, strategy: DraftStrategy):
        self._strategy = strategy

    def select(self, num_running: int) -> DraftStrategy:
        return self._strategy


def build_selector(section: SpeculationSection) -> StrategySelector:
    """The configured selector; `section` has been checked."""
    kind = section.drafts_by
    if kind == "none":
        return FixedSelector(NO_DRAFT)
    if section.selector == "fixed":
        return FixedSelector(DraftStrategy(kind, section.draft_len))
    if section.selector == "beg_mab":
        bandit = section.bandit
        arms = [DraftStrategy(kind, length) if length else NO_DRAFT for length in bandit.arms]
        return BucketedEpsilonGreedy(arms, bandit.thresholds, bandit.epsilon)
    passes = int if section.trained is None else section.trained.passes
    return CostModelSelector(kind, section.draft_len, passes=passes)
