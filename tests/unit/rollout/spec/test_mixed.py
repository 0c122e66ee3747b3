"""Which part drafts for a row: the one of the greater value, or the trained drafter alone, by the strategy."""

import numpy as np
import pytest

from megatron_tlt.models.draft import Draft
from megatron_tlt.rollout.spec.counters import SpeculationCounters
from megatron_tlt.rollout.spec.mixed import SUFFIX, TRAINED, MixedDrafter
from megatron_tlt.types import DraftStrategy, StepMeasurement


class Part:
    """Drafts chains with the same cumulative acceptance for every token, and keeps the lengths of each call."""

    def __init__(self, cumulative_acceptances, token):
        self.cumulative_acceptances, self.token, self.lengths = cumulative_acceptances, token, []

    def propose(self, rows, lengths, strategy):
        self.lengths.append(lengths.tolist())
        cumulative_acceptances = [
            s for s, n in zip(self.cumulative_acceptances, lengths, strict=True) for _ in range(n)
        ]
        depths = np.concatenate([np.arange(1, n + 1) for n in lengths]).astype(np.int32)
        nodes = len(cumulative_acceptances)
        tokens, feature = np.full(nodes, self.token, np.int32), np.zeros(nodes, np.int32)
        counts = lengths.astype(np.int32)
        return Draft(counts, tokens, np.array(cumulative_acceptances, np.float32), depths, None, feature)

    def sync_context(self, rows, strategy):
        self.synced = strategy.kind

    def observe(self, draft, reached, accepted):
        self.learned = reached.tolist()


class Rows:
    num_rows, slots = 3, np.arange(3, dtype=np.int32)


def mixed(value=4.0):
    drafter = MixedDrafter(Part([0.9, 0.1, 0.5], SUFFIX), Part([0.5, 0.8, 0.5], TRAINED), 3)
    drafter._value[:] = value
    return drafter


LENGTHS = np.array([4, 4, 0], np.int32)


def test_each_row_takes_the_draft_of_greater_value():
    drafter = mixed()
    draft = drafter.propose(Rows, LENGTHS, DraftStrategy("mixed", 4))
    assert drafter.trained.lengths == [[0, 4, 0]]  # the first row's suffix draft is worth 3.6 tokens of four
    assert draft.source.tolist() == [SUFFIX, TRAINED, SUFFIX]
    assert draft.tokens.tolist() == [SUFFIX] * 4 + [TRAINED] * 4
    np.testing.assert_allclose(draft.cumulative_acceptance, [0.9] * 4 + [0.8] * 4)
    np.testing.assert_allclose(draft.passed_over, [3.6, 0.4, 0.0])
    counters, accepted = SpeculationCounters(), np.array([1, 1, 1, 0, 1, 1, 0, 0], bool)
    measured = StepMeasurement(DraftStrategy("mixed", 4), 3, 11, 0.1, 0.1, 8, np.zeros(4), np.zeros(4))
    counters.add(measured, draft, accepted)
    stats = counters.take()
    assert (stats.instead_tokens, stats.passed_over_tokens) == (2, pytest.approx(0.4))  # of the second row only
    reached = np.ones(8, bool)
    drafter.observe(draft, reached, reached)
    assert drafter.suffix.learned == [True] * 4 + [False] * 4
    assert drafter.trained.learned == [False] * 4 + [True] * 4


def test_a_strategy_may_choose_the_trained_part_alone():
    """Whatever the values: what is measured of one part must not depend on the other one."""
    drafter = mixed(value=0.0)
    draft = drafter.propose(Rows, LENGTHS, DraftStrategy("trained", 4))
    assert drafter.trained.lengths == [LENGTHS.tolist()] and drafter.suffix.lengths == []
    assert draft.source.tolist() == [TRAINED] * 3 and set(draft.tokens.tolist()) == {TRAINED}
    drafter.observe(draft, np.ones(8, bool), np.ones(8, bool))
    assert drafter.trained.learned == [True] * 8 and drafter.suffix.learned == [False] * 8


def test_the_trained_part_drafts_again_after_many_proposals_without_it():
    drafter = mixed(value=-1.0)
    for _ in range(300):
        drafter.propose(Rows, LENGTHS, DraftStrategy("mixed", 4))
    assert 2 <= len(drafter.trained.lengths) <= 4
    assert drafter._value[1] > 0.4  # on its way to 3.2


def test_tries_are_read_only_where_they_are_drafted_from():
    drafter = mixed()
    drafter.sync_context(Rows, DraftStrategy("trained", 4))
    assert not hasattr(drafter.suffix, "synced")
    drafter.sync_context(Rows, DraftStrategy("mixed", 4))
    assert drafter.suffix.synced == "mixed"
