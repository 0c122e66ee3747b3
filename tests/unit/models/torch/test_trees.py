"""Draft trees in the PyTorch decoder: every path of a tree is computed as if it were a chain of its own."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.models.base import Decoder
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.torch.decoder import TorchDecoder
from tests.helpers.tiny_models import Driver, random_weights
from tests.helpers.trees import Tree, copy_of, random_tree, tree_input

CONFIG = ModelConfig("qwen3", 101, 64, 2, 6, 2, 16, 96, qk_norm=True, max_position_embeddings=256)


def make(**kwargs) -> TorchDecoder:
    decoder = TorchDecoder(CONFIG, **kwargs)
    decoder.load_weights(random_weights(CONFIG))
    return decoder


def tokens(n: int, seed: int) -> list[int]:
    return torch.randint(0, 101, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def prefilled(decoder: Decoder, lengths: list[int], extra: int) -> Driver:
    """Sequences 0, 1, ... of these lengths in the cache, with blocks for `extra` rows more."""
    driver = Driver(decoder)
    driver.step([(s, tokens(n, s)) for s, n in enumerate(lengths)])
    for s, n in enumerate(lengths):
        while len(driver.tables[s]) * driver.block_size < n + extra:
            driver.tables[s].append(driver.free.pop())
    return driver


def chain_logits(driver: Driver, seq: int, ids: list[int]) -> torch.Tensor:
    """Logits of the last of `ids`, fed one by one behind sequence `seq`; the driver is left as it was."""
    kept, done = driver.kv, dict(driver.done)
    driver.kv = copy_of(kept)
    for token in ids:
        out = driver.step([(seq, [token])]).logits[-1]
    driver.kv, driver.done = kept, done
    return out


@pytest.mark.parametrize(
    ("invariant", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)]
)
def test_each_node_equals_its_path_as_a_chain(invariant: bool, dtype: torch.dtype) -> None:
    """Trees of unequal size beside a sequence with a root only, across borders of blocks and of chunks (64 keys)."""
    decoder, lengths = make(invariant=invariant, dtype=dtype), [1, 15, 31, 60]
    driver = prefilled(decoder, lengths, 20)
    trees = [random_tree(n, 101, n) for n in (9, 17, 9, 1)]
    batch = tree_input(trees, lengths, [driver.tables[s] for s in range(4)])
    got = decoder.forward(batch, copy_of(driver.kv)).logits.split([len(t.tokens) for t in trees])
    for s, tree in enumerate(trees):
        for row in range(len(tree.tokens)):
            want = chain_logits(driver, s, [tree.tokens[i] for i in tree.path(row)])
            torch.testing.assert_close(got[s][row], want, atol=1e-5, rtol=1e-5)
            assert not invariant or torch.equal(got[s][row], want)


@pytest.mark.parametrize("invariant", [False, True])
def test_the_accepted_path_moves_and_decoding_goes_on(invariant: bool) -> None:
    decoder = make(invariant=invariant)
    driver = prefilled(decoder, [14], 12)
    tree = Tree(tokens(7, 3), [-1, 0, 0, 2, 1, 3, 5])
    path = tree.path(6)
    plain = chain_logits(driver, 0, [*(tree.tokens[i] for i in path), 77])
    batch = tree_input([tree], [14], [driver.tables[0]])
    decoder.forward(batch, driver.kv)
    slots = batch.slot_mapping.tolist()
    decoder.copy_slots(driver.kv, [slots[i] for i in path], [slots[d] for d in range(len(path))])
    driver.done[0] = 14 + len(path)
    got = driver.step([(0, [77])]).logits[0]
    torch.testing.assert_close(got, plain, atol=1e-5, rtol=1e-5)
    assert not invariant or torch.equal(got, plain)


@pytest.mark.parametrize(
    ("src", "dst"), [([5, 7], [1, 2]), ([1, 2, 3], [2, 3, 4]), ([9, 8], [3, 3]), ([4, 3], [3, 4]), ([], [])]
)
def test_slots_are_copied_in_order(src: list[int], dst: list[int]) -> None:
    decoder = make()
    kv = decoder.new_kv_cache(2, 16)
    kv.data.copy_(torch.randn(kv.data.shape))
    want = kv.data.clone()
    for a, b in zip(src, dst, strict=True):
        want[:, :, b] = want[:, :, a]
    decoder.copy_slots(kv, src, dst)
    assert torch.equal(kv.data, want)


@pytest.mark.parametrize("invariant", [False, True])
def test_hidden_states_of_all_rows(invariant: bool) -> None:
    decoder = make(invariant=invariant)
    driver = prefilled(decoder, [20, 3], 10)
    trees = [random_tree(5, 101, 1), random_tree(3, 101, 2)]
    batch = tree_input(trees, [20, 3], [driver.tables[0], driver.tables[1]])
    every = decoder.forward(batch, copy_of(driver.kv))
    assert every.hidden is None
    batch.all_hidden, batch.logit_rows = True, torch.tensor([6, 2, 2], dtype=torch.int32)
    out = decoder.forward(batch, copy_of(driver.kv))
    assert out.hidden.shape == (8, 64)
    torch.testing.assert_close(out.logits, every.logits[[6, 2, 2]])
    torch.testing.assert_close(decoder.logits(out.hidden), every.logits)
