"""Draft trees as decoder input: row i of a tree is cached at the slot of position `root + i`, as in the engine."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from megatron_tlt.models.base import KVCache
from megatron_tlt.models.inputs import DecoderInput
from tests.helpers.tiny_models import Driver


@dataclass
class Tree:
    """Rows of one sequence. `parents[i]` is a row of this tree, -1 for row 0, the root."""

    tokens: list[int]
    parents: list[int]

    @property
    def depths(self) -> list[int]:
        return [len(self.path(row)) - 1 for row in range(len(self.parents))]

    def path(self, row: int) -> list[int]:
        """Rows from the root to `row`."""
        return [*(self.path(self.parents[row]) if self.parents[row] >= 0 else []), row]

    def leaves(self) -> list[int]:
        return [row for row in range(len(self.parents)) if row not in self.parents]


def tree_input(
    trees: list[Tree], roots: list[int], tables: list[list[int]], block_size: int = 16, **fields
) -> DecoderInput:
    """One batch of trees; `roots[s]` is the position of tree s's root, whose row i takes the slot of root + i."""
    tokens, positions, slots, starts, contexts, parents = [], [], [], [0], [], []
    for tree, root, table in zip(trees, roots, tables, strict=True):
        base = len(tokens)
        positions += [root + depth for depth in tree.depths]
        for i, parent in enumerate(tree.parents):
            at = root + i
            slots.append(table[at // block_size] * block_size + at % block_size)
            parents.append(-1 if parent < 0 else base + parent)
        tokens += tree.tokens
        starts.append(len(tokens))
        contexts.append(root + len(tree.tokens))
    width = max(map(len, tables))
    padded = [list(t) + [0] * (width - len(t)) for t in tables]
    rows = range(len(tokens))
    data = (tokens, positions, slots, starts, contexts, padded, list(rows), parents)
    ints = [torch.tensor(x, dtype=torch.int32) for x in data]
    return DecoderInput(*ints[:7], parents=ints[7], **fields)


def trunk_tree(rng: random.Random, trunk: int, others: int, vocab: int = 50) -> Tree:
    """A trunk of `trunk` nodes below the root, then `others` nodes anywhere; siblings hold distinct tokens."""
    tree = Tree([rng.randrange(vocab)], [-1])
    for i in range(trunk + others):
        parent = i if i < trunk else rng.randrange(len(tree.tokens))
        taken = {t for t, p in zip(tree.tokens, tree.parents, strict=True) if p == parent}
        tree.tokens.append(rng.choice([t for t in range(vocab) if t not in taken]))
        tree.parents.append(parent)
    return tree


def random_tree(size: int, vocab: int, seed: int) -> Tree:
    """A root and `size - 1` nodes below random earlier rows."""
    return trunk_tree(random.Random(seed), 0, size - 1, vocab)


def slot(driver: Driver, seq: int, position: int) -> int:
    """The slot that the sequence's block table gives a position; blocks are allocated as needed."""
    table, size = driver.tables.setdefault(seq, []), driver.block_size
    while len(table) * size <= position:
        table.append(driver.free.pop())
    return table[position // size] * size + position % size


def tree_batch(driver: Driver, trees: dict[int, Tree]) -> DecoderInput:
    """All trees in one batch, each below its sequence's cached tokens; logits of every row."""
    for seq, tree in trees.items():
        slot(driver, seq, driver.done[seq] + len(tree.tokens) - 1)
    roots, tables = [driver.done[s] for s in trees], [driver.tables[s] for s in trees]
    return tree_input(list(trees.values()), roots, tables, driver.block_size, all_hidden=True)


def copy_of(kv: KVCache) -> KVCache:
    """The same cache in other memory."""
    return KVCache(kv.num_blocks, kv.block_size, kv.data.clone())
