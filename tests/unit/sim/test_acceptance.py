import numpy as np
import pytest

from megatron_tlt.config.sim import AcceptanceSection
from megatron_tlt.sim.acceptance import AcceptanceModel
from megatron_tlt.types import DraftStrategy

ROWS = 4000


def draft_of(section, strategy, seed=0, quality=1.0):
    lengths = np.full(ROWS, strategy.draft_len)
    return AcceptanceModel(section, quality).draft(strategy, lengths, np.random.default_rng(seed))


def test_rates_are_reached():
    draft = draft_of(AcceptanceSection(rates=(0.8, 0.6)), DraftStrategy("trained", 4))
    expected = 1 + 0.8 + 0.8 * 0.6 + 0.8 * 0.36 + 0.8 * 0.216
    assert draft.emitted.mean() == pytest.approx(expected, rel=0.03)
    positions = np.arange(4)
    assert draft.accepted(4).tolist() == [(draft.emitted > p + 1).sum() for p in positions]


def test_a_token_is_emitted_as_often_as_its_acceptance_says():
    """Of drafts that end below an acceptance of `least` every token is at least so likely."""
    for least in (0.3, 0.6):
        draft = draft_of(AcceptanceSection(rates=(0.7,)), DraftStrategy("trained", 1, least))
        has_token = draft.counts > 0
        assert (draft.emitted[has_token] == 2).mean() > (1 + least) / 2 - 0.05


def test_coverage_and_reach_shorten_drafts():
    section = AcceptanceSection(rates=(0.9,), coverage=0.3, reach=0.8)
    draft = draft_of(section, DraftStrategy("suffix", 11))
    assert (draft.counts > 0).mean() == pytest.approx(0.3, abs=0.03)
    mean = sum(0.8**k for k in range(11))  # a geometric length, cut at 11
    assert draft.counts[draft.counts > 0].mean() == pytest.approx(mean, rel=0.05)


def test_a_least_cumulative_acceptance_ends_drafts_early():
    section = AcceptanceSection(rates=(0.7,))
    draft = draft_of(section, DraftStrategy("trained", 8, 0.3))
    assert 0 < draft.counts.mean() < 8
    none = AcceptanceModel(section).draft(DraftStrategy("trained", 8), np.zeros(3, int), np.random.default_rng(0))
    assert none.counts.sum() == 0 and none.passes == 0
