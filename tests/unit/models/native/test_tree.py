"""Draft trees in the native decoder: every node equals plain decoding of its path, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from megatron_tlt.errors import BackendError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.native.decoder import NativeDecoder
from tests.helpers.tiny_models import Driver, random_weights
from tests.helpers.trees import Tree, slot, tree_batch, trunk_tree

CONFIGS = {
    "gqa3": ModelConfig("qwen2", 131, 96, 2, 6, 2, 32, 200, qkv_bias=True, tie_word_embeddings=True),
    "odd head": ModelConfig("qwen3", 77, 64, 2, 4, 4, 24, 90, qk_norm=True, tie_word_embeddings=True),
    "wide group": ModelConfig("llama", 60, 64, 1, 16, 1, 64, 96),
}
# Contexts at whose end trees straddle a tile (16), a block (32) and a chunk of attention (512).
CONTEXTS = (1, 12, 28, 31, 500, 509, 511)


def make(name: str, threads: int = 1) -> NativeDecoder:
    decoder = NativeDecoder(CONFIGS[name], threads)
    decoder.load_weights(random_weights(CONFIGS[name]))
    return decoder


def ids(n: int, seed: int) -> list[int]:
    return torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def fresh(
    decoder: NativeDecoder, contexts: tuple[int, ...], seed: int, garbage: float | None = None
) -> Driver:
    """A driver with a sequence of each length in `contexts`; sequence i holds `ids(contexts[i], i)`."""
    driver = Driver(decoder, num_blocks=150, block_size=32, seed=seed)
    if garbage is not None:
        driver.kv.data.fill_(garbage)
    driver.step([(i, ids(n, i)) for i, n in enumerate(contexts)], all_rows=False)
    return driver


def plain(decoder: NativeDecoder, context: int, seq: int, tree: Tree) -> tuple[Tensor, Tensor]:
    """Logits and hidden states of every node, each path decoded token by token."""
    logits: list[Tensor] = [torch.empty(0)] * len(tree.tokens)
    hidden = list(logits)
    driver = Driver(decoder, num_blocks=60, block_size=16, seed=seq)
    driver.step([(0, ids(context, seq))], all_rows=False)
    spare, driver.kv.data = driver.kv.data, driver.kv.data.clone()
    for leaf in tree.leaves():
        driver.kv.data.copy_(spare)
        driver.done[0] = context
        for node in tree.path(leaf):
            out = driver.step([(0, [tree.tokens[node]])])
            logits[node], hidden[node] = out.logits[0], out.hidden[0]
    return torch.stack(logits), torch.stack(hidden)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tree_equals_plain_decoding_of_its_paths(name: str) -> None:
    rng = random.Random(name)
    trees = {i: trunk_tree(rng, rng.randrange(7), rng.randrange(9), 50) for i in range(len(CONTEXTS))}
    one, two = make(name), make(name, threads=2)
    want = [plain(one, CONTEXTS[i], i, tree) for i, tree in trees.items()]
    for decoder, seed, garbage in ((one, 1, None), (two, 2, 3e4), (one, 3, float("nan"))):
        driver = fresh(decoder, CONTEXTS, seed, garbage)
        out = decoder.forward(tree_batch(driver, trees), driver.kv)
        assert torch.equal(out.logits, torch.cat([w[0] for w in want]))
        assert torch.equal(out.hidden, torch.cat([w[1] for w in want]))


def test_deep_branches_and_trees_over_row_chunks() -> None:
    """Two branches of 64 rows from the root, and more rows in the batch than are computed together (256)."""
    decoder = make("gqa3", 2)
    rng = random.Random(1)
    trunk = [-1, *range(64)]
    fork = Tree([rng.randrange(50) for _ in range(129)], [*trunk, 0, *range(65, 128)])
    contexts = (470, 511, 3)
    trees = {0: fork, 1: fork, 2: trunk_tree(rng, 20, 100)}
    driver = fresh(decoder, contexts, 0, 1e4)
    out = decoder.forward(tree_batch(driver, trees), driver.kv)
    want = [plain(decoder, contexts[i], i, tree) for i, tree in trees.items()]
    assert torch.equal(out.logits, torch.cat([w[0] for w in want]))
    assert torch.equal(out.hidden, torch.cat([w[1] for w in want]))


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_goes_on_after_the_accepted_path_was_moved(name: str) -> None:
    decoder, rng = make(name), random.Random(7)
    contexts = (13, 30, 508)
    trees = {i: trunk_tree(rng, 3, 12) for i in range(len(contexts))}
    driver = fresh(decoder, contexts, 5)
    decoder.forward(tree_batch(driver, trees), driver.kv)
    src, dst, paths = [], [], []
    for seq, tree in trees.items():
        path = tree.path(max(tree.leaves(), key=lambda n: (tree.depths[n], n)))
        paths.append([tree.tokens[n] for n in path])
        for depth, node in enumerate(path):
            src.append(slot(driver, seq, contexts[seq] + node))
            dst.append(slot(driver, seq, contexts[seq] + depth))
        driver.done[seq] += len(path)
    assert src != dst
    decoder.copy_slots(driver.kv, src, dst)
    alone = fresh(decoder, contexts, 6)
    for seq, path in enumerate(paths):
        for token in path:
            alone.step([(seq, [token])])
    for token in (4, 9):
        a, b = (d.step([(i, [token]) for i in range(len(contexts))]) for d in (driver, alone))
        assert torch.equal(a.logits, b.logits) and torch.equal(a.hidden, b.hidden)


def test_hidden_states_of_all_rows_come_beside_a_few_logits() -> None:
    decoder = make("odd head")
    driver = fresh(decoder, (5, 9), 1)
    batch = tree_batch(driver, {0: trunk_tree(random.Random(0), 2, 3), 1: trunk_tree(random.Random(1), 4, 0)})
    every = decoder.forward(batch, driver.kv)
    batch.logit_rows = torch.tensor([1, 8], dtype=torch.int32)
    some = decoder.forward(batch, driver.kv)
    assert torch.equal(some.hidden, every.hidden) and torch.equal(some.logits, every.logits[[1, 8]])
    batch.all_hidden = False
    assert decoder.forward(batch, driver.kv).hidden is None


def test_wrong_parents_are_refused() -> None:
    decoder = make("gqa3")
    driver = fresh(decoder, (20, 20), 1)
    tree = Tree([1, 2, 3], [-1, 0, 0])
    for parents in ([0, 0, 0, -1, 3, 3], [-1, 0, 0, 0, 3, 3], [-1, 0, 3, -1, 3, 3], [-1, 0, 2, -1, 3, 3]):
        batch = tree_batch(driver, {0: tree, 1: tree})
        batch.parents = torch.tensor(parents, dtype=torch.int32)
        with pytest.raises(BackendError, match="parent"):
            decoder.forward(batch, driver.kv)
    batch = tree_batch(driver, {0: tree})
    batch.positions[2] += 1  # not its parent's next
    with pytest.raises(BackendError, match="parent"):
        decoder.forward(batch, driver.kv)
    batch.parents = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(BackendError, match="parents must be"):
        decoder.forward(batch, driver.kv)


def test_branches_that_are_too_deep_are_refused() -> None:
    decoder = make("gqa3")
    driver = fresh(decoder, (20,), 1)
    deep = Tree([1] * 67, [-1, 0, 0, *range(2, 66)])
    with pytest.raises(BackendError, match="64 rows deeper"):
        decoder.forward(tree_batch(driver, {0: deep}), driver.kv)


def test_slots_outside_the_cache_are_refused() -> None:
    decoder = make("gqa3")
    kv = decoder.new_kv_cache(2, 16)
    for src, dst in (([0, 32], [1, 2]), ([-1], [0]), ([0], [32]), ([0, 1], [2])):
        with pytest.raises(BackendError, match="copy_slots"):
            decoder.copy_slots(kv, src, dst)
    decoder.copy_slots(kv, [], [])


def test_slots_are_copied_in_order() -> None:
    """A chain of copies hands the first slot on; every layer, head and plane moves."""
    decoder = make("gqa3")
    driver = fresh(decoder, (33,), 2)
    at = [slot(driver, 0, p) for p in range(33)]
    decoder.copy_slots(driver.kv, [at[3], at[20]], torch.tensor([at[20], at[32]]))
    other = fresh(decoder, (33,), 2)
    decoder.copy_slots(other.kv, [at[3], at[3]], [at[32], at[20]])
    assert torch.equal(driver.kv.data, other.kv.data)
    changed = driver.kv.data != fresh(decoder, (33,), 2).kv.data
    per_slot = decoder.kv_bytes_per_block(16) // 16 // decoder.dtype.itemsize
    assert 0.5 * 2 * per_slot < int(changed.sum()) <= 2 * per_slot
