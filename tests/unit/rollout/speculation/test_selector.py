"""Fixed strategies, and the configured selector."""

import json

import numpy as np
import pytest

from megatron_tlt.config.speculation import BanditSection, SpeculationSection
from megatron_tlt.rollout.speculation.bandit import BucketedEpsilonGreedy
from megatron_tlt.rollout.speculation.cost_model_selector import CostModelSelector
from megatron_tlt.rollout.speculation.selector import build_selector
from megatron_tlt.types import NO_DRAFT, DraftStrategy
from tests.helpers.spec_world import measured


def test_the_configured_selector_is_built():
    section = SpeculationSection(drafter="suffix", selector="fixed", draft_len=5)
    assert build_selector(section).select(3) == DraftStrategy("suffix", 5)
    bandit = build_selector(SpeculationSection(drafter="eagle3", selector="beg_mab"))
    assert isinstance(bandit, BucketedEpsilonGreedy)
    assert bandit.select(1) == DraftStrategy("trained", 6) and bandit.arms["none"] == NO_DRAFT
    selector = build_selector(SpeculationSection(drafter="eagle"))
    assert isinstance(selector, CostModelSelector)
    assert selector.select(1) == NO_DRAFT  # plain decoding is measured first


@pytest.mark.parametrize("name", ["fixed", "beg_mab", "cost_model"])
def test_states_are_restored_by_a_selector_of_the_same_configuration(name):
    section = SpeculationSection(drafter="eagle", selector=name)
    shorter = section.model_copy(update={"draft_len": 3, "bandit": BanditSection(thresholds=(1, 4))})
    selector, other = build_selector(section), build_selector(section)
    for _ in range(60):
        strategy = selector.select(2)
        rows = 2 + strategy.draft_len
        selector.record(measured(strategy, 2, rows, np.array([2, 1]), 5e-5, 3e-4 + 1e-5 * rows))
    saved = json.loads(json.dumps(selector.state_dict()))
    other.load_state_dict(saved)
    assert other.state_dict() == selector.state_dict()
    for config, state in ((shorter, saved), (section, {"selector": "another"})):
        fresh = build_selector(config)
        fresh.load_state_dict(state)
        assert fresh.state_dict() == build_selector(config).state_dict()
