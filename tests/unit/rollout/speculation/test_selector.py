"""Fixed strategies, and the configured selector."""

from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.rollout.speculation.bandit import BucketedEpsilonGreedy
from megatron_tlt.rollout.speculation.cost_model_selector import CostModelSelector
from megatron_tlt.rollout.speculation.selector import build_selector
from megatron_tlt.types import NO_DRAFT, DraftStrategy


def test_the_configured_selector_is_built():
    section = SpeculationSection(drafter="suffix", selector="fixed", draft_len=5)
    assert build_selector(section).select(3) == DraftStrategy("suffix", 5)
    bandit = build_selector(SpeculationSection(drafter="eagle3", selector="beg_mab"))
    assert isinstance(bandit, BucketedEpsilonGreedy)
    assert bandit.select(1) == DraftStrategy("trained", 6) and bandit.arms["none"] == NO_DRAFT
    selector = build_selector(SpeculationSection(drafter="eagle"))
    assert isinstance(selector, CostModelSelector)
    assert selector.select(1) == NO_DRAFT  # plain decoding is measured first
