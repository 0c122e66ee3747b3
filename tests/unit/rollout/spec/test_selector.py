"""Fixed strategies."""

import numpy as np

from megatron_tlt.rollout.spec.selector import FixedSelector
from megatron_tlt.types import DraftStrategy
from tests.helpers.spec_world import measured

SURVIVAL = np.array([0.9, 0.5, 0.8, 0.7, 0.6], np.float32)
DEPTHS = np.array([1, 2, 1, 2, 3], np.int32)
COUNTS = np.array([2, 3], np.int32)


def test_fixed_always_drafts_and_feeds_everything():
    strategy = DraftStrategy("eagle", 5)
    selector = FixedSelector(strategy)
    assert {selector.select(running).name for running in (1, 7, 64)} == {strategy.name}
    assert selector.prune(strategy, 2, SURVIVAL, DEPTHS, COUNTS, None).tolist() == [True] * 5


def test_fixed_feeds_the_likeliest_nodes_up_to_its_number():
    strategy = DraftStrategy("eagle", 3, 1, 3)
    keep = FixedSelector(strategy).prune(strategy, 2, SURVIVAL, DEPTHS, COUNTS, None)
    assert keep.tolist() == [True, True, True, True, False]


def test_fixed_has_nothing_to_remember():
    selector = FixedSelector(DraftStrategy("eagle", 3))
    before = selector.state_dict()
    selector.record(measured(selector.select(2), 2, 8, np.array([1, 4], np.int32), 1e-5, 1e-3))
    assert selector.state_dict() == before
    selector.load_state_dict(before)
    assert selector.select(2).draft_len == 3
