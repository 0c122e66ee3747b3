"""Paged hidden states: the state (`decoders.base.Decoder`) of every cached token, in pages as its keys and values.

The state of the token fed at position p of a request lies at the slot of p, in the same block
tables as the KV cache. So samples share those of their prompt, forks copy them, and recomputation writes them again.
The routed experts of a token, which router replay needs, are kept in the same way.

Legend: W width of a state, T rows of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_tlt.models.decoders.torch.transfer import HostCopies, HostCopy, indices


class PagedHiddenStates:
    """The states of `num_blocks` blocks of `block_size` positions. On CPU unused blocks take no memory."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.num_blocks, self.block_size = num_blocks, block_size
        self._copies = HostCopies(torch.device(device))
        self.data = torch.zeros(num_blocks * block_size, width, dtype=dtype, device=device)  # [slots, W]

    def release(self) -> None:
        """Frees the memory until `resume`; the states are lost. Mutates."""
        self.data = self.data.new_empty(0, self.data.shape[1])

    def resume(self) -> None:
        """Allocates the memory again, zeroed, after a `release`: at another address. Mutates."""
        self.data = self.data.new_zeros(self.num_blocks * self.block_size, self.data.shape[1])

    def write(self, slots: Tensor, hidden: Tensor) -> None:
        """`hidden` [T, W] to `slots` [T] of any integer type, both on the device. Mutates the pages."""
        self.data.index_copy_(0, slots.long(), hidden)

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copies block src[i] to dst[i]; all sources are read before anything is written."""
        blocks = self.data.view(self.num_blocks, self.block_size, -1)
        if len(src) == 1:  # the usual case, in a quarter of the time
            blocks[dst[0]].copy_(blocks[src[0]])
        else:
            device = self.data.device
            blocks[indices(dst, device)] = blocks[indices(src, device)]

    def like(self, count: int) -> Tensor:
        """What `start_read` reads, [count, W], on the meta device."""
        return self.data.new_empty(count, self.data.shape[1], device="meta")

    def start_read(self, blocks: Sequence[int], count: int) -> HostCopy:
        """Starts to copy the first `count` states [count, W] of a request with these `blocks` to the host.

        The host does not wait for the device; the blocks may be written again at once.
        """
        device = self.data.device
        within = torch.arange(self.block_size, device=device)
        slots = (indices(blocks, device)[:, None] * self.block_size + within).flatten()[:count]
        return self._copies.start(self.data[slots])


def page_bytes(block_size: int, width: int, dtype: torch.dtype) -> int:
    """Memory of one block's hidden states, in bytes."""
    return block_size * width * dtype.itemsize
