"""Draft trees as decoder input: a root and nodes with slots of their own, and the same paths as plain chains.

Legend: T rows of the tree, the root included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_tlt.models.base import KVCache
from megatron_tlt.models.inputs import DecoderInput


@dataclass
class Tree:
    """Rows of one sequence. `parents[i]` is a row of this tree, -1 for row 0, the root."""

    tokens: list[int]
    parents: list[int]

    def depth(self, row: int) -> int:
        return 0 if self.parents[row] < 0 else 1 + self.depth(self.parents[row])

    def path(self, row: int) -> list[int]:
        """Rows from the root to `row`."""
        return [*(self.path(self.parents[row]) if self.parents[row] >= 0 else []), row]


def tree_input(
    trees: list[Tree], roots: list[int], tables: list[list[int]], block_size: int = 16, **fields
) -> DecoderInput:
    """One batch of trees; `roots[s]` is the position of tree s's root, whose row i takes the slot of root + i."""
    tokens, positions, slots, starts, contexts, parents = [], [], [], [0], [], []
    for tree, root, table in zip(trees, roots, tables, strict=True):
        base = len(tokens)
        for i, parent in enumerate(tree.parents):
            at = root + i
            positions.append(root + tree.depth(i))
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


def random_tree(size: int, vocab: int, seed: int) -> Tree:
    """A root and `size - 1` nodes hung onto random earlier rows."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(size, generator=generator)
    parents = [-1] + [int(draws[i] * i) for i in range(1, size)]
    return Tree(torch.randint(0, vocab, (size,), generator=generator).tolist(), parents)


def copy_of(kv: KVCache) -> KVCache:
    """The same cache in other memory."""
    return KVCache(kv.num_blocks, kv.block_size, kv.data.clone())
