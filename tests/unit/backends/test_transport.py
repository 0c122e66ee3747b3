"""Tensors on their way to an engine; handles of GPU memory in trtllm/test_engine_side.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_tlt.backends.transport import in_shared_memory
from megatron_tlt.errors import SyncError
from tests.helpers.disk import files_of_at_most


def test_shared_memory_that_is_too_small_is_named_with_sizes_and_remedy(tmp_path: Path) -> None:
    """64 MiB are a container's default."""
    words = rf"cannot write {tmp_path}/tensors: 0\.4 MiB are needed, [\d.]+ MiB are free in shared memory \(--shm-size"
    tensors = [("a.weight", torch.ones(100_000))]
    with files_of_at_most(10_000), pytest.raises(SyncError, match=words), in_shared_memory(tensors, tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
