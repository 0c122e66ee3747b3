"""The kernel that draws tokens against the sampler in PyTorch, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton

from megatron_tlt.models.decoders.keyed_noise import best_candidates, gumbel_noise, key_tensor
from megatron_tlt.models.decoders.torch.kernels import sampling
from megatron_tlt.rollout.sampler import Sampler, SamplingRows
from tests.helpers.interpreted import DEVICE

tl = triton.language
HEATS = np.array([0.0, 0.7, 1.0, 1.5], np.float32)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several blocks, the last one not full, without the time that the interpreter takes for large ones."""
    monkeypatch.setattr(sampling, "_BLOCK", 128)


def rows_of(count: int, top_k=0, top_p=1.0, min_p=0.0, seed: int = 0) -> SamplingRows:
    keys = np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)
    masks = [np.full(count, v, t) for v, t in ((top_k, np.int32), (top_p, np.float64), (min_p, np.float32))]
    return SamplingRows(keys, np.resize(HEATS, count), *masks, is_masked=bool(top_k or top_p < 1 or min_p))


def logits_of(rows: int, vocab: int, step: float = 0.0) -> torch.Tensor:
    """Normal logits; with `step` rounded to its multiples, so that many are equal."""
    made = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    return (torch.round(made / step) * step if step else made).to(DEVICE)


def assert_same(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    want, score = Sampler(DEVICE).sample(logits, rows)
    got, logprob = Sampler(DEVICE, kernel=sampling.draw).sample(logits, rows)
    assert got.tolist() == want.tolist()
    torch.testing.assert_close(logprob, score, atol=2e-6, rtol=1e-6)
    return got


@triton.jit
def _noise(keys, out, vocab, N: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, N)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    tl.store(out + row * vocab + at, sampling._gumbel(key, at), mask=at < vocab)


def test_noise_is_the_samplers_within_its_logarithms_rounding() -> None:
    """Over 2^20 hashes, so also at their ends, where the noise is largest."""
    keys = key_tensor(np.random.default_rng(5).integers(0, 2**64, 64, dtype=np.uint64), DEVICE)
    want, got = gumbel_noise(keys, 1 << 14), torch.empty(64, 1 << 14, device=DEVICE)
    _noise[(64,)](keys, got, 1 << 14, N=1 << 14)
    assert want.max() > 13 and want.min() < -2.5
    torch.testing.assert_close(got, want, atol=3e-7, rtol=5e-7)


@pytest.mark.parametrize("vocab", [1, 127, 300])
def test_tokens_are_those_of_the_sampler(vocab: int) -> None:
    assert_same(logits_of(16, vocab), rows_of(16))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(1, 1.0, 0.0), (40, 1.0, 0.0), (199, 1.0, 0.0), (900, 1.0, 0.0), (0, 0.9, 0.0), (0, 1e-6, 0.0),
     (0, 1 - 1e-12, 0.0), (0, 1.0, 0.2), (0, 1.0, 1.0), (50, 0.7, 0.05)],
)  # fmt: skip
def test_masks_leave_the_same_tokens(top_k: int, top_p: float, min_p: float) -> None:
    """In the last rows most scores at a bound have equals, of which top-p drops those of the lowest ids."""
    logits = torch.cat([logits_of(2, 200), logits_of(2, 200, step=0.5)])
    assert_same(logits, rows_of(4, top_k, top_p, min_p))


def test_among_equal_scores_top_p_drops_the_lowest_ids() -> None:
    """Of 200 equal tokens all but two weigh too little: every id drawn is one of the last ones, in a later block."""
    logits, rows = torch.zeros(4, 200, device=DEVICE), rows_of(4, top_p=0.01)
    rows.temperature[:] = 1
    assert int(assert_same(logits, rows).min()) >= 197


@pytest.mark.filterwarnings("ignore:invalid value")
def test_ends_of_the_range_of_logits() -> None:
    """Forbidden tokens, zeros of both signs, and what a broken policy gives: never a token that does not exist."""
    logits = logits_of(4, 200)
    logits[:, 100:] = float("-inf")
    logits[1:3, :100] = -0.0
    logits[2, 50:60] = 0.0
    assert_same(logits, rows_of(4))
    assert_same(logits, rows_of(4, top_k=7, top_p=0.8))
    broken = torch.full((2, 200), float("nan"), device=DEVICE)
    token, logprob = Sampler(DEVICE, kernel=sampling.draw).sample(broken, rows_of(2, top_k=5))
    assert bool(((token >= 0) & (token < 200)).all()) and bool(logprob.isnan().all())


@pytest.mark.parametrize("of", ["all tokens", "some tokens", "some of each row"])
@pytest.mark.parametrize(("vocab", "count"), [(3, 3), (4, 1), (300, 4)])
def test_candidates_of_a_drafter_are_the_largest_scores(vocab: int, count: int, of: str) -> None:
    rows = rows_of(8)
    ids = torch.argsort(logits_of(8, 2 * vocab))[:, :vocab]  # of 2V tokens
    given = {"all tokens": None, "some tokens": ids[0], "some of each row": ids.contiguous()}[of]
    keys, heat = key_tensor(rows.keys, DEVICE), torch.from_numpy(rows.temperature).to(DEVICE)
    logits = logits_of(8, vocab)
    want = best_candidates(logits, keys, heat, count, given)
    got = sampling.best_candidates(logits.clone(), keys, heat, count, given)
    assert got[1].tolist() == want[1].tolist()
    torch.testing.assert_close(got[0], want[0], atol=1e-6, rtol=1e-6)


def test_among_equal_candidates_the_lowest_ids_come_first() -> None:
    logits = torch.zeros(1, 600, device=DEVICE)
    logits[0, [590, 17, 3]] = 1.0
    found = sampling.best_candidates(logits, torch.zeros(1, dtype=torch.int64, device=DEVICE), logits[0, :1], 4)
    assert found[1].tolist() == [[3, 17, 590, 0]]


def test_half_precision_logits_are_read_as_they_are() -> None:
    logits, rows = logits_of(8, 300).bfloat16(), rows_of(8)
    sampler = Sampler(DEVICE, kernel=sampling.draw)
    assert sampler.sample(logits, rows)[0].tolist() == Sampler(DEVICE).sample(logits.float(), rows)[0].tolist()
