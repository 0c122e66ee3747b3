"""Whom the hybrid drafter asks: each row the part that promises more, or one part alone where a strategy says so."""

import numpy as np
import pytest

from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.hybrid import EAGLE, SUFFIX, HybridDrafter
from megatron_tlt.types import DraftStrategy


class Part:
    """Drafts chains with the same cumulative acceptance for every token, and notes for which rows it was asked."""

    def __init__(self, cumulative_acceptances, token):
        self.cumulative_acceptances, self.token, self.asked = cumulative_acceptances, token, []

    def propose(self, rows, lengths, strategy):
        self.asked.append(lengths.tolist())
        cumulative_acceptances = [
            s for s, n in zip(self.cumulative_acceptances, lengths, strict=True) for _ in range(n)
        ]
        depths = np.concatenate([np.arange(1, n + 1) for n in lengths]).astype(np.int32)
        nodes = len(cumulative_acceptances)
        tokens, feature = np.full(nodes, self.token, np.int32), np.zeros(nodes, np.int32)
        counts = lengths.astype(np.int32)
        return Draft(counts, tokens, np.array(cumulative_acceptances, np.float32), depths, None, feature)

    def sync_context(self, rows, strategy):
        self.followed = strategy.kind

    def observe(self, draft, reached, accepted):
        self.learned = reached.tolist()


class Rows:
    num_rows, slots = 3, np.arange(3, dtype=np.int32)


def hybrid(promise=4.0):
    drafter = HybridDrafter(Part([0.9, 0.1, 0.5], SUFFIX), Part([0.5, 0.8, 0.5], EAGLE), 3)
    drafter._promise[:] = promise
    return drafter


LENGTHS = np.array([4, 4, 0], np.int32)


def test_each_row_takes_what_promises_more():
    drafter = hybrid()
    draft = drafter.propose(Rows, LENGTHS, DraftStrategy("hybrid", 4))
    assert drafter.eagle.asked == [[0, 4, 0]]  # 3.6 tokens of four are promised to the first row already
    assert draft.source.tolist() == [SUFFIX, EAGLE, SUFFIX]
    assert draft.tokens.tolist() == [SUFFIX] * 4 + [EAGLE] * 4
    np.testing.assert_allclose(draft.cumulative_acceptance, [0.9] * 4 + [0.8] * 4)
    reached = np.ones(8, bool)
    drafter.observe(draft, reached, reached)
    assert drafter.suffix.learned == [True] * 4 + [False] * 4
    assert drafter.eagle.learned == [False] * 4 + [True] * 4


@pytest.mark.parametrize(("kind", "source"), [("suffix", SUFFIX), ("eagle", EAGLE)])
def test_a_strategy_may_ask_for_one_part_alone(kind, source):
    """Whatever was promised: a trial of a part must not depend on how the other one does."""
    drafter = hybrid(promise=0.0)
    draft = drafter.propose(Rows, LENGTHS, DraftStrategy(kind, 4))
    part, other = (drafter.suffix, drafter.eagle) if source == SUFFIX else (drafter.eagle, drafter.suffix)
    assert part.asked == [LENGTHS.tolist()] and other.asked == []
    assert draft.source.tolist() == [source] * 3 and set(draft.tokens.tolist()) == {source}
    drafter.observe(draft, np.ones(8, bool), np.ones(8, bool))
    assert part.learned == [True] * 8


def test_eagle_must_promise_a_quarter_more():
    drafter = hybrid(promise=2.0)
    chosen = drafter._ask(np.zeros(4, np.int32), np.full(4, 5, np.int32), np.array([0.0, 1.0, 1.5, 3.0]))
    assert chosen.tolist() == [True, True, False, False]


def test_eagle_is_tried_again_after_long_silence():
    drafter = hybrid(promise=-1.0)
    for _ in range(300):
        drafter.propose(Rows, LENGTHS, DraftStrategy("hybrid", 4))
    assert 2 <= len(drafter.eagle.asked) <= 4
    assert drafter._promise[1] > 0.4  # on its way to 3.2


def test_tries_are_followed_where_they_are_read():
    drafter = hybrid()
    drafter.sync_context(Rows, DraftStrategy("eagle", 4))
    assert not hasattr(drafter.suffix, "followed")
    for kind in ("hybrid", "suffix"):
        drafter.sync_context(Rows, DraftStrategy(kind, 4))
        assert drafter.suffix.followed == kind
