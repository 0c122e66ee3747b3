"""Memory of the native decoder."""

import re
from pathlib import Path

import pytest
import torch

from megatron_tlt.models.native.parts import Arena

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_an_arena_is_zero_and_gives_pages_that_do_not_overlap():
    arena = Arena(3 * 4096)
    first, second = arena.take(5), arena.take(4096)
    assert not first.any() and not second.any()
    first.fill_(7)
    assert not second.any() and second.data_ptr() % 4096 == 0
    assert second.data_ptr() - first.data_ptr() == 4096


@pytest.mark.skipif(
    not _ENABLED.exists() or "[never]" in _ENABLED.read_text(), reason="this kernel gives no large pages"
)
def test_an_arena_has_large_pages():
    size = (9 << 20) + 4096
    memory = Arena(size).take(size)
    memory.fill_(1)
    assert _large_bytes(memory) >= 8 << 20  # one may be missing on a machine whose memory is in pieces


def _large_bytes(tensor: torch.Tensor) -> int:
    """Bytes of large pages in the mapping that the tensor begins in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= tensor.data_ptr() < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the tensor is in no mapping")
