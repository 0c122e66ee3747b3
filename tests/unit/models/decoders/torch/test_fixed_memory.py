"""Memory that comes back at its address, by the driver's own functions over the host's memory."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from megatron_tlt.errors import BackendError
from megatron_tlt.models.decoders import base
from megatron_tlt.models.decoders.base import KVCache
from tests.helpers.driver_memory import HostMemory, build_driver

MIB = 1 << 20


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_driver(tmp_path_factory.mktemp("driver"))


def bytes_of(driver: ctypes.CDLL, name: str) -> ctypes.c_size_t:
    return ctypes.c_size_t.in_dll(driver, name)


def test_memory_goes_and_comes_back_at_its_address(driver) -> None:
    memory = HostMemory(driver, 3 * MIB)
    data, address = memory.tensor(), memory.address
    assert address % (1 << 12) == 0 and address > 1 << 32
    assert bytes_of(driver, "taken").value == 4 * MIB, "rounded up to the driver's step"
    data.fill_(7)
    for _ in range(3):
        memory.release()
        assert bytes_of(driver, "taken").value == 0 and _resident(address) == 0
        memory.take()
        assert memory.address == address == data.data_ptr()
        assert int(data.sum()) == 0, "other memory"
        data.fill_(5)
        assert int(data.sum(dtype=torch.int64)) == 5 * 3 * MIB
    del memory
    assert bytes_of(driver, "taken").value == 0


def _resident(address: int) -> int:
    """KiB of the mapping at `address` that are in memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{address:x}-"))
    return int(next(line for line in lines[at:] if line.startswith("Rss:")).split()[1])


def test_a_device_without_room_is_out_of_memory_and_an_error_names_the_way_out(driver, monkeypatch) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"0\.06 GiB"):
        HostMemory(driver, 65 * MIB)
    memory = HostMemory(driver, MIB)
    memory.release()
    bytes_of(driver, "room").value = MIB
    with pytest.raises(torch.OutOfMemoryError):
        memory.take()
    bytes_of(driver, "room").value = 64 * MIB
    memory.take()
    memory.release()
    with monkeypatch.context() as patched:
        patched.setattr(memory, "_size", 12345)
        with pytest.raises(BackendError, match=r"cuMemCreate failed .* 1; rollout.release_cache"):
            memory.take()


def test_a_mapping_that_may_not_be_written_to_is_undone(driver, monkeypatch) -> None:
    memory = HostMemory(driver, MIB)
    memory.release()
    with monkeypatch.context() as patched:
        patched.setattr(memory._access, "flags", 0)
        with pytest.raises(BackendError, match="cuMemSetAccess failed"):
            memory.take()
    assert bytes_of(driver, "taken").value == 0 and not memory.is_taken
    memory.take()
    assert memory.tensor().fill_(3).sum() == 3 * MIB


def test_a_cache_keeps_its_address_and_starts_with_zeros(driver, monkeypatch) -> None:
    monkeypatch.setattr(base, "FixedMemory", lambda size, device: HostMemory(driver, size))
    kv = KVCache(4, 16, torch.ones(2, 2, 5 * 16, 8, dtype=torch.bfloat16))
    shape, size = kv.data.shape, kv.nbytes
    kv.fix_address()
    address = kv.data.data_ptr()
    assert (kv.data.shape, kv.nbytes, kv.data.dtype) == (shape, size, torch.bfloat16)
    for _ in range(2):
        assert not kv.data.any()
        kv.data.fill_(float("nan"))
        kv.release()
        kv.resume(lambda *_: pytest.fail("a new cache"))
        assert kv.data.data_ptr() == address


def test_pytorchs_context_is_used_where_a_thread_has_none(driver) -> None:
    before = ctypes.c_int.in_dll(driver, "contexts_set").value
    HostMemory(driver, MIB)
    HostMemory(driver, MIB)
    assert before <= 1 and ctypes.c_int.in_dll(driver, "contexts_set").value == 1
