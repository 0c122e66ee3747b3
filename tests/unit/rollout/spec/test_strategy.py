"""The factory of selectors."""

import numpy as np
import pytest

from megatron_tlt.config.speculation import BanditSection, SpeculationSection
from megatron_tlt.errors import ConfigError
from megatron_tlt.rollout.spec.bandit import BucketedEpsilonGreedy
from megatron_tlt.rollout.spec.cost_aware import CostModelSelector
from megatron_tlt.rollout.spec.selector import FixedSelector
from megatron_tlt.rollout.spec.strategy import build_selector
from megatron_tlt.types import DraftStrategy
from tests.helpers.spec_world import measured

SURVIVAL = np.array([0.9, 0.5, 0.8, 0.7, 0.6], np.float32)
DEPTHS = np.array([1, 2, 1, 2, 3], np.int32)
COUNTS = np.array([2, 3], np.int32)


def test_the_factory_builds_what_is_configured():
    fixed = build_selector(
        SpeculationSection(selector="fixed", draft_len=5, topk=2, min_cumulative_acceptance=0.2), "suffix"
    )
    assert isinstance(fixed, FixedSelector)
    assert fixed.select(3) == DraftStrategy("suffix", 5, 2, 0, 0.2)
    bandit = build_selector(SpeculationSection(selector="beg_mab", min_cumulative_acceptance=0.1), "eagle")
    assert isinstance(bandit, BucketedEpsilonGreedy)
    assert bandit.select(1) == DraftStrategy("eagle", 6, 2, 12, 0.1)
    aware = build_selector(SpeculationSection(min_cumulative_acceptance=0.3), "hybrid")
    assert isinstance(aware, CostModelSelector) and aware.kind == "hybrid"
    assert aware.select(1).kind == "none"  # plain decoding comes first: what the rest is measured by


def test_arms_that_cannot_be_are_named():
    section = SpeculationSection(selector="beg_mab", bandit=BanditSection(arms=("3_1_4", "3_1_9")))
    with pytest.raises(ConfigError, match=r"rollout\.speculation\.bandit\.arms = '3_1_9'"):
        build_selector(section, "eagle")


def test_the_simulator_may_run_all_of_it_by_these_calls():
    """Every selector through the same steps: what is admitted is a mask, and states come back."""
    for name in ("fixed", "beg_mab", "cost_aware"):
        section = SpeculationSection(selector=name)
        selector, other = build_selector(section, "eagle"), build_selector(section, "eagle")
        for _ in range(30):
            strategy = selector.select(2)
            if strategy.kind == "none":
                selector.record(measured(strategy, 2, 2, np.ones(2, np.int32), 0.0, 3e-4))
                continue
            keep = selector.prune(strategy, 2, SURVIVAL, DEPTHS, COUNTS, None)
            assert keep.dtype == bool and keep.shape == (5,)
            selector.record(
                measured(strategy, 2, 2 + int(keep.sum()), np.array([2, 1], np.int32), 5e-5, 4e-4)
            )
        other.load_state_dict(selector.state_dict())
        assert other.state_dict() == selector.state_dict()
