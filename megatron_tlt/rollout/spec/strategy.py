"""The configured selector. Torch-free."""

from __future__ import annotations

from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.rollout.spec.bandit import BucketedEpsilonGreedy, parse_arm
from megatron_tlt.rollout.spec.cost_aware import CostModelSelector
from megatron_tlt.rollout.spec.selector import FixedSelector, StrategySelector
from megatron_tlt.types import DraftStrategy


def build_selector(section: SpeculationSection, kind: str) -> StrategySelector:
    """The configured selector for a drafter of `kind`. Raises ConfigError for arms that cannot be."""
    if section.selector == "fixed":
        return FixedSelector(
            DraftStrategy(
                kind,
                section.draft_len,
                section.topk,
                min_cumulative_acceptance=section.min_cumulative_acceptance,
            )
        )
    if section.selector == "beg_mab":
        bandit = section.bandit
        arms = [parse_arm(text, kind, section.min_cumulative_acceptance) for text in bandit.arms]
        return BucketedEpsilonGreedy(
            arms, bandit.thresholds, bandit.epsilon, bandit.epsilon_decay, bandit.window
        )
    return CostModelSelector(kind, section.draft_len, section.topk)
