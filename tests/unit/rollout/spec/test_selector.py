"""Fixed strategies."""

import numpy as np

from megatron_tlt.rollout.spec.selector import FixedSelector, Rests
from megatron_tlt.types import DraftStrategy

SURVIVAL = np.array([0.9, 0.5, 0.8, 0.7, 0.6], np.float32)
DEPTHS = np.array([1, 2, 1, 2, 3], np.int32)
COUNTS = np.array([2, 3], np.int32)


def test_fixed_always_drafts_and_feeds_everything():
    strategy = DraftStrategy("eagle", 5)
    selector = FixedSelector(strategy)
    assert {selector.select(running).name for running in (1, 7, 64)} == {strategy.name}
    assert selector.admit(strategy, 2, SURVIVAL, DEPTHS, COUNTS, None).tolist() == [True] * 5


def test_fixed_feeds_the_likeliest_nodes_up_to_its_number():
    strategy = DraftStrategy("eagle", 3, 1, 3)
    keep = FixedSelector(strategy).admit(strategy, 2, SURVIVAL, DEPTHS, COUNTS, None)
    assert keep.tolist() == [True, True, True, True, False]


def test_fixed_has_nothing_to_remember():
    selector = FixedSelector(DraftStrategy("eagle", 3))
    before = selector.state_dict()
    selector.observe(selector.select(2), 2, 8, np.array([1, 4], np.int32), 1e-5, 1e-3)
    assert selector.state_dict() == before
    selector.load_state_dict(before)
    assert selector.select(2).draft_len == 3


class Granting(FixedSelector):
    """Grants `grant` steps; notes what it is told."""

    def __init__(self, grant):
        super().__init__(DraftStrategy("eagle", 3))
        self.grant, self.told = grant, []

    def rest(self, running):
        return self.grant

    def observe_rest(self, running, seconds):
        self.told.append((running, seconds))


def open_rests(grant):
    """A selector, its rests, and a way to make the clock tick."""
    now = [0.0]
    selector = Granting(grant)
    rests = Rests(selector, lambda: now[0])

    def step(running, seconds=1.0):
        taken = rests.take(running)
        now[0] += seconds
        return taken

    return selector, rests, step


def test_a_rest_ends_where_its_requests_change_and_goes_on():
    selector, rests, step = open_rests(4)
    assert not step(5)
    rests.ask(5)
    assert [step(b) for b in (5, 5, 4, 3, 4, 4)] == [True, True, True, False, True, False]
    assert selector.told == [(5, [1.0, 1.0]), (4, [1.0]), (4, [1.0])]


def test_a_selector_that_changes_its_mind_at_the_news_is_asked_again():
    selector, rests, step = open_rests(100)
    rests.ask(5)
    assert step(5)
    selector.grant = 1
    assert step(4)  # it was told of the step before
    assert not step(4)


def test_time_that_the_caller_took_is_no_step():
    selector, rests, step = open_rests(5)
    rests.ask(2)
    for seconds in (1.0, 1.0, 1000.0, 2.0):
        step(2, seconds)
    rests.end()
    rests.end()
    assert selector.told == [(2, [1.0, 1.0, 4.0, 2.0])]


def test_what_is_forgotten_is_neither_granted_nor_told():
    selector, rests, step = open_rests(5)
    rests.ask(2)
    assert step(2)
    rests.forget()
    assert not step(2)
    assert not selector.told
