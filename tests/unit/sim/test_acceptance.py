import numpy as np
import pytest

from megatron_tlt.config.sim import AcceptanceSection
from megatron_tlt.sim.acceptance import Acceptance
from megatron_tlt.types import DraftStrategy

ROWS = 4000


def draft_of(section, strategy, seed=0, quality=1.0):
    lengths = np.full(ROWS, strategy.draft_len)
    return Acceptance(section, quality).draft(strategy, lengths, np.random.default_rng(seed))


def naive_emitted(draft, keep):
    """Row by row: from the root along matched children that were kept."""
    emitted, start = [], 0
    for count in draft.counts:
        nodes = range(start, start + count)
        parent = [int(draft.depths[n]) - 2 for n in nodes]  # the trunk's node one level up, -1: the root
        at, tokens = -1, 1
        while True:
            children = [i for i, n in enumerate(nodes) if parent[i] == at and keep[n] and draft.matches[n]]
            if not children:
                break
            assert len(children) == 1, "two siblings cannot both be the policy's token"
            at, tokens = children[0], tokens + 1
        emitted.append(tokens)
        start += count
    return emitted


def test_rates_are_reached_and_cumulative_acceptance_is_calibrated():
    section = AcceptanceSection(rates=(0.8, 0.6))
    draft = draft_of(section, DraftStrategy("trained", 4))
    emitted = draft.emitted(np.ones(draft.num_nodes, bool))
    expected = 1 + 0.8 + 0.8 * 0.6 + 0.8 * 0.36 + 0.8 * 0.216
    assert emitted.mean() == pytest.approx(expected, rel=0.03)
    for low in (0.1, 0.5, 0.8):
        some = (
            (draft.depths == 1)
            & (draft.cumulative_acceptance > low)
            & (draft.cumulative_acceptance < low + 0.15)
        )
        assert draft.matches[some].mean() == pytest.approx(draft.cumulative_acceptance[some].mean(), abs=0.06)


@pytest.mark.parametrize("topk", [1, 2, 4])
def test_emitted_tokens_are_those_of_a_naive_walk(topk):
    draft = draft_of(AcceptanceSection(rates=(0.7,), siblings=0.5), DraftStrategy("trained", 5, topk))
    order = np.argsort(-draft.cumulative_acceptance, kind="stable")
    keep = np.zeros(draft.num_nodes, bool)
    keep[order[: int(0.7 * len(order))]] = True  # closed under ancestors, as admission is
    assert draft.emitted(keep).tolist() == naive_emitted(draft, keep)


def test_siblings_emit_as_configured():
    section = AcceptanceSection(rates=(0.6,), siblings=0.5)
    alone = draft_of(section, DraftStrategy("trained", 1))
    pair = draft_of(section, DraftStrategy("trained", 1, 2))
    assert alone.emitted(np.ones(alone.num_nodes, bool)).mean() == pytest.approx(1.6, abs=0.03)
    assert pair.emitted(np.ones(pair.num_nodes, bool)).mean() == pytest.approx(1.6 + 0.4 * 0.5, abs=0.03)


def test_coverage_and_reach_shorten_drafts():
    section = AcceptanceSection(rates=(0.9,), coverage=0.3, reach=0.8)
    draft = draft_of(section, DraftStrategy("suffix", 11))
    assert (draft.counts > 0).mean() == pytest.approx(0.3, abs=0.03)
    mean = sum(0.8**k for k in range(11))  # a geometric length, cut at 11
    assert draft.counts[draft.counts > 0].mean() == pytest.approx(mean, rel=0.05)


def test_a_least_cumulative_acceptance_ends_drafts_early():
    section = AcceptanceSection(rates=(0.7,))
    draft = draft_of(section, DraftStrategy("trained", 8, min_cumulative_acceptance=0.3))
    assert draft.cumulative_acceptance.min() >= 0.3
    assert 0 < draft.counts.mean() < 8
    none = Acceptance(section).draft(DraftStrategy("trained", 8), np.zeros(3, int), np.random.default_rng(0))
    assert none.num_nodes == 0 and none.passes == 0
