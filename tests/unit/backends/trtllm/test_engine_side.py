"""What crosses to the engine's process: modules that run there, and handles of GPU memory."""

from __future__ import annotations

import ast
import asyncio
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from megatron_tlt.backends import transport
from megatron_tlt.backends.entries import DEVICE, load_tensors
from megatron_tlt.backends.serving import line_of, message_of
from megatron_tlt.backends.transport import by_cuda_ipc, older_handle
from megatron_tlt.backends.trtllm.server import TrtllmHost
from megatron_tlt.errors import SyncError

ROOT = Path(__file__).parents[4]
THERE = ("serving", "entries", "trtllm/server", "trtllm/extension")  # modules of the engine's environment


@pytest.mark.parametrize("name", THERE)
def test_what_runs_there_imports_nothing_of_ours_and_is_python_3_10(name: str) -> None:
    source = (ROOT / "megatron_tlt" / "backends" / f"{name}.py").read_text()
    tree = ast.parse(source, feature_version=(3, 10))
    imported = {
        node.module or "" if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if not (isinstance(node, ast.ImportFrom) and node.level)
    }
    siblings = {
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level and node.module
    }
    assert not [m for m in imported if m.split(".")[0] in ("megatron_tlt", "pydantic", "numpy", "mpi4py")]
    assert siblings <= {name.split("/")[-1] for name in THERE}


@pytest.mark.parametrize(("records", "found"), [([], {}), ([{}] * 3, {"steps": 3}), (None, {})])
def test_heartbeats_bring_the_steps_of_an_engine_that_counts_them(records: Any, found: dict[str, int]) -> None:
    host = TrtllmHost(lambda message: None)
    host._engine = SimpleNamespace(get_stats=lambda timeout: list(records))  # None raises
    asyncio.run(host.poll_stats())
    assert host.progress() == found


def test_gpu_handles_are_put_together_again_in_torchs_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is needed: the plain data of a copy crosses the wire and becomes the arguments of torch's own function,
    with the handle in the engine's form.
    """
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    given = {
        "tensor_cls": torch.Tensor,
        "tensor_size": torch.Size([2, 3]),
        "tensor_stride": (3, 1),
        "tensor_offset": 64,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.bfloat16,
        "storage_device": 3,
        "storage_handle": b"\x03c" + bytes(range(64)),
        "storage_size_bytes": 1 << 33,
        "storage_offset_bytes": 512,
        "requires_grad": False,
        "ref_counter_handle": b"/torch_1_2",
        "ref_counter_offset": 4,
        "event_handle": bytes(64),
        "event_sync_required": True,
    }
    assert names == list(given), "of the torch that trains"
    copies: list[torch.Tensor] = []
    reduced = rebuild_cuda_tensor, tuple(given.values())
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: copies.append(tensor) or reduced)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *args: dict(zip(names, args, strict=True)))
    monkeypatch.setattr(transport, "_GPU", "cpu")
    for name in ("synchronize", "ipc_collect"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    pushed = torch.ones(3, 2, dtype=torch.bfloat16).t()
    with by_cuda_ipc([("a.weight", pushed)]) as location:
        message = message_of(line_of({"type": "weights", "tensors": location}))
    assert torch.equal(copies[0], pushed) and copies[0].is_contiguous()
    assert copies[0].data_ptr() != pushed.data_ptr(), "the stream's memory may be used again"
    there = load_tensors(message["tensors"], 1)["a.weight"]
    assert names[DEVICE] == "storage_device"
    older = b"\x02c" + bytes(range(64))
    assert there == {**given, "storage_device": 1, "storage_handle": older}, "the engine's own device"


def test_a_handle_of_a_newer_torch_becomes_one_that_the_engines_torch_reads() -> None:
    """torch 2.13 writes version 3, torch <= 2.12 refuses it; plain memory's bytes are the same in both."""
    driver = bytes(range(64))
    for given in (b"\x03c" + driver, b"\x04c" + driver):
        assert older_handle(given) == b"\x02c" + driver
    with pytest.raises(SyncError, match=r"set sync\.transport"):
        older_handle(b"\x03e" + driver)
    with pytest.raises(SyncError, match="memory of kind 120"):
        older_handle(b"\x03x" + driver)
