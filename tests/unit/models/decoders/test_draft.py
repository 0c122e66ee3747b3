"""What is kept of a draft, against brute force over all choices of first tokens."""

from itertools import product

import numpy as np
import pytest

from megatron_tlt.models.decoders.draft import Draft


def test_no_other_first_tokens_are_worth_more_less_the_price_of_their_rows():
    rng = np.random.default_rng(7)
    for _ in range(40):
        counts = rng.integers(0, 5, 3).astype(np.int32)
        likely = [np.cumprod(rng.choice([0.3, 0.5, 0.8, 1.0], n)) for n in counts]
        draft = Draft(counts, np.arange(counts.sum(), dtype=np.int32), np.concatenate(likely).astype(np.float32))
        price = float(rng.uniform(0.05, 0.95))
        kept = draft.likely(price)
        starts = np.cumsum(counts) - counts
        first = [np.arange(start, start + n) for start, n in zip(starts, kept.counts, strict=True)]
        assert kept.tokens.tolist() == np.concatenate(first).tolist()
        worth = max(
            sum(float((row[:n] - price).sum()) for row, n in zip(likely, lengths, strict=True))
            for lengths in product(*(range(n + 1) for n in counts.tolist()))
        )
        assert (kept.cumulative_acceptance - price).sum() == pytest.approx(worth, abs=1e-5)
