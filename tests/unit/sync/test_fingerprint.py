"""The name of a policy's weights: the same however ranks share the work, another for any other bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_tlt.sync.fingerprint import WeightFingerprint, device_sum
from tests.helpers.memory import MetaMemory


def weights(change: str = "") -> list[tuple[str, Tensor]]:
    torch.manual_seed(0)
    found = [(f"layer.{i}", torch.randn(5, 3 + i)) for i in range(5)]
    found += [("half", torch.randn(7).to(torch.bfloat16)), ("scalar", torch.tensor(2.0))]
    if change == "bit":
        found[3][1].view(torch.int32)[2, 1] ^= 1
    if change == "name":
        found[1] = ("other", found[1][1])
    if change == "exchange":
        found[0], found[1] = ("layer.0", found[0][1].flip(0)), found[1]
    if change == "transposed":
        found[2] = ("layer.2", found[2][1].t().contiguous())
    return found


def fingerprint(tensors: list[tuple[str, Tensor]], size: int = 1) -> set[str]:
    """The fingerprints of all `size` ranks."""
    box: list[Any] = []

    class World:
        def __init__(self, rank: int):
            self.rank, self.size = rank, size

        def all_gather_object(self, value: Any) -> list[Any]:
            return box

    ranks = [WeightFingerprint(World(rank)) for rank in range(size)]  # type: ignore[arg-type]
    for rank in ranks:
        passed = list(rank.watch(tensors))
        assert all(a is b for (_, a), (_, b) in zip(passed, tensors, strict=True))
        box.append(rank._sums)
    return {rank.take() for rank in ranks}


def test_any_number_of_ranks_gives_the_same_name() -> None:
    names = [fingerprint(weights(), size) for size in (1, 2, 3, 8)]
    assert names == [names[0]] * 4 and len(names[0]) == 1


@pytest.mark.parametrize("change", ["bit", "name", "exchange", "transposed"])
def test_any_change_gives_another(change: str) -> None:
    assert fingerprint(weights(change)) != fingerprint(weights())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_sum_for_devices_sees_every_bit_and_every_exchange(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of numbers that are summed apart."""
    monkeypatch.setattr("megatron_tlt.sync.fingerprint._CHUNK", 8)
    torch.manual_seed(1)
    tensor = (torch.randn(37) * 50).to(dtype)
    flat = tensor.view(torch.uint8)
    sums = {device_sum(flat)}
    for place in range(flat.numel()):
        for bit in range(8):
            flat[place] ^= 1 << bit
            sums.add(device_sum(flat))
            flat[place] ^= 1 << bit
    assert len(sums) == 1 + 8 * flat.numel()
    for place in range(1, 37):
        other = tensor.clone()
        other[0], other[place] = tensor[place], tensor[0]
        changed = not torch.equal(other, tensor)
        assert (device_sum(other.view(torch.uint8)) != device_sum(flat)) == changed


def test_the_sum_for_devices_takes_little_memory() -> None:
    with MetaMemory() as memory:
        flat = torch.empty(1 << 28, dtype=torch.uint8, device="meta")
        memory.reset_peak()
        device_sum(flat)
    assert memory.peak - (1 << 28) <= 160 << 20
