"""A row's bits depend on its own tokens only: not on batch, chunking, threads, block placement.

The native decoder promises it always, the PyTorch decoder with `rollout.numerics: invariant`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import linear

from megatron_tlt.errors import BackendError
from megatron_tlt.models.decoders.base import Decoder
from megatron_tlt.models.decoders.factory import build_decoder
from megatron_tlt.models.decoders.torch import invariant
from megatron_tlt.models.hf.config import ModelConfig
from tests.helpers.tiny_models import Driver, moe_config, random_weights

CONFIGS = {
    "gqa3": ModelConfig("qwen2", 131, 96, 2, 6, 2, 32, 200, qkv_bias=True, tie_word_embeddings=True),
    "odd head": ModelConfig("qwen3", 77, 64, 2, 4, 4, 24, 90, qk_norm=True, tie_word_embeddings=True),
    "odd sizes": ModelConfig("qwen3", 77, 52, 2, 4, 4, 20, 91, qk_norm=True, tie_word_embeddings=True),
    "wide group": ModelConfig("llama", 300, 128, 2, 16, 1, 128, 320),
    "experts": moe_config("qwen2_moe", 131),
    "head 256": ModelConfig("llama", 50, 64, 1, 2, 2, 256, 64),
    "wide mlp": ModelConfig("llama", 300, 64, 1, 16, 1, 16, 2500),
}
NATIVE = [("native", name) for name in ("gqa3", "odd head", "wide group", "experts", "head 256")]
TORCH = [("torch", name) for name in ("gqa3", "odd sizes", "experts", "wide mlp")]
CASES = [(*case, dtype) for case in NATIVE + TORCH for dtype in (torch.float32, torch.bfloat16)]
BATCHES = {"native": (1, 2, 3, 5, 7, 11, 12, 13, 24, 63, 69), "torch": (1, 6, 15, 32)}
PIECES = {  # the last one is what remains; native chunks have 256 rows and 512 of context
    "native": (700, [[1] * 40, [13, 256, 1, 300], [255, 254, 1, 1, 2, 1, 5, 1], [650]]),
    "torch": (150, [[1] * 20, [13, 64, 1, 30], [17, 80], [149]]),
}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make(kernels: str, name: str, dtype: torch.dtype = torch.float32, threads: int = 1) -> Decoder:
    numerics = "invariant" if kernels == "torch" else "default"
    decoder = build_decoder(CONFIGS[name], dtype=dtype, kernels=kernels, threads=threads, numerics=numerics)
    decoder.load_weights(random_weights(CONFIGS[name]))
    return decoder


def tokens(n: int, seed: int) -> list[int]:
    return torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(("kernels", "name", "dtype"), CASES, ids=str)
def test_a_row_alone_equals_the_row_among_others(kernels: str, name: str, dtype: torch.dtype) -> None:
    torch.set_num_threads(1 if dtype == torch.float32 else 3)
    prompt, following = tokens(70, 1), tokens(4, 2)
    alone, decoder = Driver(make(kernels, name, dtype), seed=3), make(kernels, name, dtype, threads=2)
    want = [alone.step([(0, prompt)]).logits[-1]] + [alone.step([(0, [t])]).logits[0] for t in following]
    for others in BATCHES[kernels]:
        shared = Driver(decoder, num_blocks=400, seed=others)
        shared.step([(i, tokens(1 + i % 19, i)) for i in range(1, others + 1)])
        got = [shared.step([(0, prompt)]).logits[-1]]
        place = others // 2
        for step, token in enumerate(following):
            chunks = [(i, [tokens(9, i)[step]]) for i in range(1, others + 1)]
            chunks.insert(place, (0, [token]))
            got.append(shared.step(chunks).logits[place])
        for a, b in zip(want, got, strict=True):
            assert torch.equal(a, b), f"differs among {others} others"


@pytest.mark.parametrize(("kernels", "name", "dtype"), CASES, ids=str)
def test_prefill_in_one_piece_equals_any_chunking(kernels: str, name: str, dtype: torch.dtype) -> None:
    total, ways = PIECES[kernels]
    ids = tokens(total, 4)
    whole = Driver(make(kernels, name, dtype), num_blocks=50).step([(0, ids)])
    decoder = make(kernels, name, dtype, threads=2)
    for pieces in ways:
        driver, at, rows = Driver(decoder, num_blocks=50, seed=len(pieces)), 0, []
        for size in [*pieces, total - sum(pieces)]:
            rows.append(driver.step([(0, ids[at : at + size])]))
            at += size
        assert torch.equal(torch.cat([r.logits for r in rows]), whole.logits)
        assert torch.equal(torch.cat([r.hidden for r in rows]), whole.hidden)


@pytest.mark.parametrize(("threads", "dtype"), [(3, torch.float32), (8, torch.float32), (3, torch.bfloat16)], ids=str)
def test_threads_change_nothing(threads: int, dtype: torch.dtype) -> None:
    outputs = []
    for n in (1, threads):
        driver = Driver(make("native", "gqa3", dtype, n), num_blocks=200)
        first = driver.step([(i, tokens(3 + 5 * i, i)) for i in range(9)]).logits
        later = [driver.step([(i, [i]) for i in range(9)]).logits for _ in range(5)]
        outputs.append(torch.cat([first, *later]))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_leftovers_in_recycled_blocks_are_never_read(kernels: str, dtype: torch.dtype) -> None:
    """Even NaN in unwritten positions must not leak into a result."""
    decoder = make(kernels, "gqa3", dtype)
    clean, dirty = Driver(decoder), Driver(decoder)
    dirty.kv.data.view(dtype).fill_(float("nan"))
    for length in (1, 2, 15, 16, 17, 33, 64, 65):
        ids = tokens(length, length)
        assert torch.equal(clean.step([(length, ids)]).logits, dirty.step([(length, ids)]).logits)


@pytest.mark.parametrize(("kernels", "name"), TORCH)
def test_invariant_and_default_agree(kernels: str, name: str) -> None:
    default, ids = build_decoder(CONFIGS[name], kernels=kernels), tokens(90, 5)
    default.load_weights(random_weights(CONFIGS[name]))
    a, b = (Driver(decoder).step([(0, ids)]).logits for decoder in (make(kernels, name), default))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_library_that_rounds_by_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_place(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = linear(x, weight, bias)
        out[9:] *= 1 + 1e-6
        return out

    driver = Driver(make("torch", "gqa3"))
    monkeypatch.setattr("megatron_tlt.models.decoders.torch.layers.linear", by_place)
    with pytest.raises(BackendError, match="by their place"):
        driver.step([(0, [1])])


@pytest.mark.parametrize("threads", [1, 3])
def test_long_rows_are_cut_alike(threads: int) -> None:
    """Equal rows stay equal through an elementwise function whatever their width."""
    torch.set_num_threads(threads)
    for width in (7, 40001):
        row = torch.randn(1, width, generator=torch.Generator().manual_seed(width)) * 5
        out = invariant.rowwise(torch.exp, row.expand(16, -1).contiguous())
        assert torch.equal(out, out[:1].expand_as(out))
        torch.testing.assert_close(out, row.exp().expand_as(out))
