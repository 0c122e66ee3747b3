"""The native decoder's promise: a row's bits do not depend on batch, chunking, threads or block placement."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.native.decoder import NativeDecoder
from tests.helpers.tiny_models import Driver, moe_config, random_weights

DTYPES = (torch.float32, torch.bfloat16)
CONFIGS = {
    "gqa3": ModelConfig("qwen2", 131, 96, 2, 6, 2, 32, 200, qkv_bias=True, tie_word_embeddings=True),
    "odd head": ModelConfig("qwen3", 77, 64, 2, 4, 4, 24, 90, qk_norm=True, tie_word_embeddings=True),
    "wide group": ModelConfig("llama", 300, 128, 2, 16, 1, 128, 320),
    "experts": moe_config("qwen2_moe", 131),
    "head 256": ModelConfig("llama", 50, 64, 1, 2, 2, 256, 64),
}


def make(name: str, dtype: torch.dtype, threads: int) -> NativeDecoder:
    decoder = NativeDecoder(CONFIGS[name], dtype, threads)
    decoder.load_weights(random_weights(CONFIGS[name]))
    return decoder


def tokens(n: int, seed: int) -> list[int]:
    return torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_alone_equals_decoding_in_any_batch(name: str, dtype: torch.dtype) -> None:
    prompt, following = tokens(37, 1), tokens(6, 2)
    alone = Driver(make(name, dtype, 1), seed=3)
    want = [alone.step([(0, prompt)]).logits[-1]] + [alone.step([(0, [t])]).logits[0] for t in following]
    decoder = make(name, dtype, 2)
    for others in (1, 2, 3, 5, 7, 11, 12, 13, 24, 63, 69):
        shared = Driver(decoder, num_blocks=400, seed=others)
        shared.step([(i, tokens(1 + i % 19, i)) for i in range(1, others + 1)])
        got = [shared.step([(0, prompt)]).logits[-1]]
        for step, token in enumerate(following):
            place = others // 2
            chunks = [(i, [tokens(9, i)[step]]) for i in range(1, others + 1)]
            chunks.insert(place, (0, [token]))
            got.append(shared.step(chunks).logits[place])
        for a, b in zip(want, got, strict=True):
            assert torch.equal(a, b), f"differs among {others} others"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_in_one_piece_equals_any_chunking(name: str, dtype: torch.dtype) -> None:
    ids = tokens(700, 4)  # beyond one chunk of rows (256) and one chunk of context (512)
    whole = Driver(make(name, dtype, 1), num_blocks=50).step([(0, ids)])
    decoder = make(name, dtype, 2)
    for pieces in ([1] * 40, [13, 256, 1, 300], [255, 257], [650]):
        driver, at, rows = Driver(decoder, num_blocks=50, seed=len(pieces)), 0, []
        for size in [*pieces, 700 - sum(pieces)]:
            out = driver.step([(0, ids[at : at + size])])
            rows.append(out)
            at += size
        assert torch.equal(torch.cat([r.logits for r in rows]), whole.logits)
        assert torch.equal(torch.cat([r.hidden for r in rows]), whole.hidden)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_change_nothing(threads: int, dtype: torch.dtype) -> None:
    outputs = []
    for n in (1, threads):
        driver = Driver(make("gqa3", dtype, n), num_blocks=200)
        first = driver.step([(i, tokens(3 + 5 * i, i)) for i in range(9)]).logits
        outputs.append(
            torch.cat([first] + [driver.step([(i, [i]) for i in range(9)]).logits for _ in range(5)])
        )
    assert torch.equal(*outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_leftovers_in_recycled_blocks_are_never_read(dtype: torch.dtype) -> None:
    """Even NaN in unwritten positions must not leak into a result."""
    decoder = make("gqa3", dtype, 1)
    clean, dirty = Driver(decoder), Driver(decoder)
    dirty.kv.data.view(dtype).fill_(float("nan"))
    for length in (1, 2, 15, 16, 17, 33):
        ids = tokens(length, length)
        a, b = clean.step([(length, ids)]).logits, dirty.step([(length, ids)]).logits
        assert torch.equal(a, b)
