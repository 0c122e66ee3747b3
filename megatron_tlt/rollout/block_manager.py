"""Paged KV-cache blocks and their reference counts. Torch-free: the simulator runs the same code.

A block is `block_size` token positions of every layer. References to a block are counted, so that the samples of one
prompt share its full blocks. The holder of the only reference may write.
"""

from __future__ import annotations

from collections.abc import Sequence


class BlockManager:
    """Allocates block numbers `0 .. num_blocks - 1`. Every operation costs O(blocks it touches)."""

    def __init__(self, num_blocks: int, block_size: int):
        assert min(num_blocks, block_size) > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        # A stack, lowest number on top: the last block freed is the one still warm in the cache.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Free blocks."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` positions occupy."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks with one reference each. The caller has checked `num_free`."""
        assert count <= len(self._free), f"{count} blocks requested, {len(self._free)} free"
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Adds one reference to each block: the holder of a fork reads them and writes none of them."""
        references = self._references
        for block in blocks:
            assert references[block] > 0, f"block {block} is free and cannot be shared"
            references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drops one reference of each block; the last one returns it. Freeing twice is an assertion."""
        references = self._references
        for block in blocks:
            count = references[block]
            assert count > 0, f"block {block} freed twice"
            references[block] = count - 1
            if count == 1:
                self._free.append(block)
