"""Random draft trees over cached sequences, as the engine lays them out: node i of a tree is cached at the slot of
position `root + i`, the trunk first.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from megatron_tlt.models.inputs import DecoderInput
from tests.helpers.tiny_models import Driver


@dataclass
class Tree:
    """Nodes of one sequence; node 0 is the root, whose parent is -1."""

    tokens: list[int]
    parents: list[int]

    @property
    def depths(self) -> list[int]:
        out: list[int] = []
        for parent in self.parents:
            out.append(out[parent] + 1 if parent >= 0 else 0)
        return out

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`."""
        out = [node]
        while self.parents[out[-1]] >= 0:
            out.append(self.parents[out[-1]])
        return out[::-1]

    def leaves(self) -> list[int]:
        return [n for n in range(len(self.parents)) if n not in self.parents]


def random_tree(rng: random.Random, trunk: int, others: int, vocab: int = 50) -> Tree:
    """A trunk of `trunk` nodes under the root, then `others` nodes anywhere; siblings hold distinct tokens."""
    tree = Tree([rng.randrange(vocab)], [-1])
    for i in range(trunk + others):
        parent = i if i < trunk else rng.randrange(len(tree.tokens))
        taken = {t for t, p in zip(tree.tokens, tree.parents, strict=True) if p == parent}
        tree.tokens.append(rng.choice([t for t in range(vocab) if t not in taken]))
        tree.parents.append(parent)
    return tree


def slot(driver: Driver, seq: int, position: int) -> int:
    """The slot that the sequence's block table gives a position; blocks are taken as needed."""
    table, size = driver.tables.setdefault(seq, []), driver.block_size
    while len(table) * size <= position:
        table.append(driver.free.pop())
    return table[position // size] * size + position % size


def tree_batch(driver: Driver, trees: dict[int, Tree]) -> DecoderInput:
    """All trees in one batch, each below its sequence's cached tokens; logits of every row."""
    tokens, positions, slots, parents, starts, contexts, tables = [], [], [], [], [0], [], []
    for seq, tree in trees.items():
        root, base = driver.done[seq], len(tokens)
        slots += [slot(driver, seq, root + i) for i in range(len(tree.tokens))]
        positions += [root + d for d in tree.depths]
        parents += [base + p if p >= 0 else -1 for p in tree.parents]
        tokens += tree.tokens
        starts.append(len(tokens))
        contexts.append(root + len(tree.tokens))
        tables.append(driver.tables[seq])
    width = max(map(len, tables))
    padded = [t + [0] * (width - len(t)) for t in tables]
    data = (tokens, positions, slots, starts, contexts, padded, range(len(tokens)), parents)
    return DecoderInput(*(torch.tensor(list(x), dtype=torch.int32) for x in data), all_hidden=True)
