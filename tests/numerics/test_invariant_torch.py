"""`rollout.numerics: invariant` in the PyTorch decoder: a row's bits depend on its own tokens only.

The same promises as the native decoder's (tests/unit/models/test_invariance.py), plus draft trees.
"""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.errors import BackendError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.factory import build_decoder
from megatron_tlt.models.torch import invariant
from tests.helpers.tiny_models import Driver, moe_config, random_weights
from tests.helpers.trees import copy_of, random_tree, tree_input

DTYPES = (torch.float32, torch.bfloat16)
CONFIGS = {
    "gqa3": ModelConfig("qwen2", 131, 96, 2, 6, 2, 32, 200, qkv_bias=True, tie_word_embeddings=True),
    "odd sizes": ModelConfig("qwen3", 77, 52, 2, 4, 4, 20, 91, qk_norm=True, tie_word_embeddings=True),
    "experts": moe_config("qwen2_moe", 131),
    "wide mlp": ModelConfig("llama", 300, 64, 1, 16, 1, 16, 2500),
}


def make(name: str, dtype: torch.dtype = torch.float32, numerics="invariant"):
    decoder = build_decoder(CONFIGS[name], dtype=dtype, kernels="torch", numerics=numerics)
    decoder.load_weights(random_weights(CONFIGS[name]))
    return decoder


def tokens(n: int, seed: int) -> list[int]:
    return torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_alone_equals_the_row_among_others(name: str, dtype: torch.dtype, threads: int) -> None:
    is_thorough = (threads, name, dtype) == (1, "gqa3", torch.float32)
    decoder = make(name, dtype)
    prompt, following = tokens(70, 1), tokens(3, 2)
    alone = Driver(decoder, seed=3)
    want = [alone.step([(0, prompt)]).logits[-1]] + [alone.step([(0, [t])]).logits[0] for t in following]
    for others in range(1, 33) if is_thorough else (1, 6, 15, 32):
        shared = Driver(decoder, num_blocks=200, seed=others)
        shared.step([(i, tokens(1 + i % 19, i)) for i in range(1, others + 1)])
        got = [shared.step([(0, prompt)]).logits[-1]]
        place = others // 2
        for step, token in enumerate(following):
            chunks = [(i, [tokens(9, i)[step]]) for i in range(1, others + 1)]
            chunks.insert(place, (0, [token]))
            got.append(shared.step(chunks).logits[place])
        for a, b in zip(want, got, strict=True):
            assert torch.equal(a, b), f"differs among {others} others"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_in_one_piece_equals_any_chunking(name: str, dtype: torch.dtype) -> None:
    decoder, ids = make(name, dtype), tokens(150, 4)
    whole = Driver(decoder).step([(0, ids)])
    for pieces in ([1] * 20, [13, 64, 1, 30], [17, 80], [149]):
        driver, at, rows = Driver(decoder, seed=len(pieces)), 0, []
        for size in [*pieces, 150 - sum(pieces)]:
            rows.append(driver.step([(0, ids[at : at + size])]))
            at += size
        assert torch.equal(torch.cat([r.logits for r in rows]), whole.logits)
        assert torch.equal(torch.cat([r.hidden for r in rows]), whole.hidden)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [5, 60])
def test_a_tree_row_equals_plain_decoding(length: int, dtype: torch.dtype) -> None:
    """Beside other trees, and with a chunk border (64 keys) inside its path."""
    decoder = make("gqa3", dtype)
    driver = Driver(decoder)
    for s in range(3):
        driver.step([(s, tokens(length, s))])
        driver.tables[s] += [driver.free.pop() for _ in range(2)]
    trees = [random_tree(n, 50, n) for n in (12, 7, 16)]
    batch = tree_input(trees, [length] * 3, [driver.tables[s] for s in range(3)])
    got = decoder.forward(batch, copy_of(driver.kv)).logits.split([len(t.tokens) for t in trees])
    kept = driver.kv
    for s, tree in enumerate(trees):
        for row in range(len(tree.tokens)):
            driver.kv, driver.done[s] = copy_of(kept), length
            for i in tree.path(row):
                want = driver.step([(s, [tree.tokens[i]])]).logits[0]
            assert torch.equal(got[s][row], want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_leftovers_in_recycled_blocks_are_never_read(dtype: torch.dtype) -> None:
    decoder = make("gqa3", dtype)
    clean, dirty = Driver(decoder), Driver(decoder)
    dirty.kv.data.fill_(float("nan"))
    for length in (1, 17, 64, 65):
        ids = tokens(length, length)
        assert torch.equal(clean.step([(length, ids)]).logits, dirty.step([(length, ids)]).logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_invariant_and_default_agree(name: str) -> None:
    ids = tokens(90, 5)
    a, b = (Driver(make(name, numerics=n)).step([(0, ids)]).logits for n in ("invariant", "default"))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_library_that_rounds_by_place_is_refused() -> None:
    def by_place(x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        out[9:] += 1e-7
        return out

    with pytest.raises(BackendError, match="matmul qkv"):
        invariant.check_rows_alike("matmul qkv", by_place, torch.zeros(1, 8))


def test_long_rows_are_cut_alike(threads: int) -> None:
    """Equal rows stay equal through an elementwise function whatever their width."""
    for width in (7, 91, 2048, 5000, 40001):
        row = torch.randn(1, width, generator=torch.Generator().manual_seed(width)) * 5
        out = invariant.rowwise(torch.exp, row.expand(16, -1).contiguous())
        assert torch.equal(out, out[:1].expand_as(out))
        torch.testing.assert_close(out, row.exp().expand_as(out))
