"""Pages against a dictionary: (block, offset) -> state."""

from __future__ import annotations

import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from megatron_tlt.models.decoders.torch import transfer
from megatron_tlt.rollout.paged_hidden_states import PagedHiddenStates, page_bytes
from tests.helpers.budget import cost

BLOCKS, SIZE, WIDTH = 9, 4, 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_hold_what_was_written_last(dtype: torch.dtype) -> None:
    rng, pages = random.Random(0), PagedHiddenStates(BLOCKS, SIZE, WIDTH, dtype)
    assert pages.data.nbytes == BLOCKS * page_bytes(SIZE, WIDTH, dtype)
    known = {slot: [0.0] * WIDTH for slot in range(BLOCKS * SIZE)}
    for _ in range(200):
        kind = rng.choice(["write", "blocks", "slots"])
        if kind == "write":
            slots = rng.sample(range(BLOCKS * SIZE), rng.randint(1, 6))
            states = [[float(rng.randrange(100)) for _ in range(WIDTH)] for _ in slots]
            index = torch.tensor(slots, dtype=rng.choice([torch.int32, torch.int64]))
            pages.write(index, torch.tensor(states, dtype=dtype))
            known |= dict(zip(slots, states, strict=True))
        else:
            src, dst = rng.sample(range(BLOCKS), 2), rng.sample(range(BLOCKS), 2)
            pages.copy_blocks(src, dst)
            copied = {b * SIZE + i: known[a * SIZE + i] for a, b in zip(src, dst, strict=True) for i in range(SIZE)}
            known |= copied
        blocks, count = rng.sample(range(BLOCKS), 3), rng.randint(0, 3 * SIZE)
        want = [known[blocks[p // SIZE] * SIZE + p % SIZE] for p in range(count)]
        got = pages.start_read(blocks, count).wait()
        assert got.dtype == dtype and got.shape == (count, WIDTH) and got.tolist() == want


def test_what_was_read_is_a_copy() -> None:
    pages = PagedHiddenStates(BLOCKS, SIZE, WIDTH)
    read = pages.start_read([2, 0], 5).wait()
    pages.data[:] = 1
    assert not read.any()


def test_the_host_waits_for_no_index_on_its_way_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of the host's goes by `upload`, from pinned memory: any other copy would wait for the whole step."""
    meta = torch.device("meta")
    pages = PagedHiddenStates(BLOCKS, SIZE, WIDTH, device=meta)

    def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
        return torch.empty(values.shape, dtype=torch.from_numpy(values).dtype, device=device)

    monkeypatch.setattr(transfer, "upload", upload)
    with cost() as counted:
        pages.write(torch.empty(2, dtype=torch.int32, device=meta), torch.empty(2, WIDTH, device=meta))
        pages.copy_blocks([0, 1], [2, 3])
    assert counted.copies == 0 and counted.launches > 0


def test_states_leave_a_gpu_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in for torch.cuda: who waits for whom, and that the host waits for nothing before `wait`."""
    calls: list[str] = []

    class Event:
        def record(self, stream: str) -> None:
            calls.append(f"{stream} records")

        def query(self) -> bool:
            return "device done" in calls

        def synchronize(self) -> None:
            calls.append("host waits")

    @contextmanager
    def stream(name: str):
        calls.append(f"{name} begins")
        yield

    side = type("Side", (str,), {"wait_stream": lambda self, other: calls.append(f"{self} waits for {other}")})
    fakes = {"Stream": lambda device: side("side"), "current_stream": lambda device: "main", "stream": stream}
    for name, fake in (fakes | {"Event": Event}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(transfer, "pinned_like", torch.empty_like)
    states = torch.arange(6.0)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, s: calls.append(f"kept for {s}"))
    copy = transfer.HostCopies(torch.device("cuda", 0)).start(states)
    assert calls == ["side waits for main", "side begins", "side records", "kept for side"]
    assert not copy.is_done
    calls.append("device done")
    assert copy.is_done and torch.equal(copy.wait(), states)
    kept = copy.wait_pageable()  # not in the pinned block, which the next copy reuses
    assert torch.equal(kept, states) and kept.data_ptr() != copy.wait().data_ptr()
    on_cpu = transfer.HostCopies(torch.device("cpu")).start(states)
    assert on_cpu.wait_pageable() is on_cpu.wait()
