"""Pages against a dictionary: (block, offset) -> state."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_tlt.rollout.paged_hidden_states import PagedHiddenStates, page_bytes

BLOCKS, SIZE, WIDTH = 9, 4, 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_hold_what_was_written_last(dtype: torch.dtype) -> None:
    rng, pages = random.Random(0), PagedHiddenStates(BLOCKS, SIZE, WIDTH, dtype)
    known = {slot: [0.0] * WIDTH for slot in range(BLOCKS * SIZE)}
    for _ in range(200):
        kind = rng.choice(["write", "blocks", "slots"])
        if kind == "write":
            slots = rng.sample(range(BLOCKS * SIZE), rng.randint(1, 6))
            states = [[float(rng.randrange(100)) for _ in range(WIDTH)] for _ in slots]
            index = torch.tensor(slots, dtype=rng.choice([torch.int32, torch.int64]))
            pages.write(index, torch.tensor(states, dtype=dtype))
            known |= dict(zip(slots, states, strict=True))
        elif kind == "blocks":
            src, dst = rng.sample(range(BLOCKS), 2), rng.sample(range(BLOCKS), 2)
            pages.copy_blocks(src, dst)
            copied = {
                b * SIZE + i: known[a * SIZE + i] for a, b in zip(src, dst, strict=True) for i in range(SIZE)
            }
            known |= copied
        else:
            src, dst = (rng.sample(range(BLOCKS * SIZE), 5) for _ in range(2))
            pages.copy_slots(src, dst)
            known |= {b: known[a] for a, b in zip(src, dst, strict=True)}
        blocks, count = rng.sample(range(BLOCKS), 3), rng.randint(0, 3 * SIZE)
        want = [known[blocks[p // SIZE] * SIZE + p % SIZE] for p in range(count)]
        got = pages.read(blocks, count)
        assert got.dtype == dtype and got.shape == (count, WIDTH) and got.tolist() == want


def test_what_was_read_is_a_copy() -> None:
    pages = PagedHiddenStates(BLOCKS, SIZE, WIDTH)
    read = pages.read([2, 0], 5)
    pages.data[:] = 1
    assert not read.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_of_a_block(dtype: torch.dtype) -> None:
    assert PagedHiddenStates(BLOCKS, SIZE, WIDTH, dtype).data.nbytes == BLOCKS * page_bytes(
        SIZE, WIDTH, dtype
    )
