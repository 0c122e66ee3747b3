"""The adapter against what is recorded of TensorRT-LLM: it uses the recorded names, and the tests notice any other."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import reductions
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from megatron_tlt.backends.entries import DEVICE, handle_of
from megatron_tlt.backends.process import child_environment
from megatron_tlt.backends.transport import ipc_entry, older_handle, pack_tensors
from megatron_tlt.backends.trtllm.launch import launch_of
from megatron_tlt.backends.wire import frame, message_of
from megatron_tlt.config.trtllm import TrtllmSection
from megatron_tlt.errors import SyncError
from tests.helpers.trtllm_adapter import EXTENSION, run_adapter
from tests.helpers.trtllm_fake.contract import Contract
from tests.helpers.trtllm_fake.package import install, uninstall

ROOT = Path(__file__).parents[4]
FILES = sorted((ROOT / "tests" / "contracts" / "trtllm").glob("*.json"))
THERE = (  # modules of the engine's environment
    *("wire", "serving", "receiving", "entries"),
    *("trtllm/instances", "trtllm/server", "trtllm/extension"),
)


def used_names(path: Path) -> list[tuple[str, ...]]:
    """Every name that the adapter uses of a contract, as the fake noted it."""
    contract = Contract.load(path)
    run_adapter(contract)
    return sorted(contract.used)


MUTATIONS = [pytest.param(f, p, id=f"{f.stem}:{'.'.join(p)}") for f in FILES for p in used_names(f)]


@pytest.mark.parametrize(("path", "used"), MUTATIONS)
def test_a_renamed_name_is_noticed(path: Path, used: tuple[str, ...]) -> None:
    contract = Contract.load(path).renamed(used)
    with pytest.raises(
        (AttributeError, ImportError, KeyError, TypeError, ValueError, RuntimeError, AssertionError)
    ):
        run_adapter(contract)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_what_must_be_among_the_used_names(path: Path) -> None:
    """So that the mutations cannot become few without a message."""
    used = {p.values[1] for p in MUTATIONS if p.values[0] == path}
    eagle = "EagleDecodingConfig" if path.stem.startswith("1.2") else "Eagle3DecodingConfig"
    assert {
        ("classes", "AsyncLLM"),
        ("classes", "AsyncLLM", "fields", "max_input_len"),
        ("classes", "AsyncLLM", "fields", "dtype", "literals", "bfloat16"),
        ("classes", "AsyncLLM", "methods", "generate_async", "params", "sampling_params"),
        ("classes", eagle, "fields", "allow_advanced_sampling"),
        ("classes", "NGramDecodingConfig", "fields", "max_matching_ngram_size"),
        ("classes", "CudaGraphConfig", "fields", "max_batch_size"),
        ("classes", "SamplingParams", "fields", "include_stop_str_in_output"),
        ("classes", "SamplingParams", "fields", "min_p"),
        ("classes", "WorkerExtension", "methods", "update_weights"),
        ("classes", "Model", "methods", "load_draft_weights"),
        ("functions", "get_device_uuid"),
        ("literals", "memory_tag", "values", "kv_cache"),
        ("stats", "drafting", "numAcceptedTokens"),
        ("environment", "TLLM_DISABLE_MPI"),
    } <= used
    assert not {p for p in used if "logprobs" in p[-1]}, "log-probs are never asked for"


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
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level and node.module
    }
    assert not [m for m in imported if m.split(".")[0] in ("megatron_tlt", "pydantic", "numpy", "mpi4py")]
    assert siblings <= {name.split("/")[-1] for name in THERE}


class OnGpu(torch.Tensor):
    """A tensor that says so."""

    is_cuda = True


def test_gpu_handles_are_put_together_again_in_torchs_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is needed: the plain data crosses the wire and becomes the arguments of torch's own function, with
    the handle in the engine's form.
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
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (rebuild_cuda_tensor, tuple(given.values())))
    entry = ipc_entry(
        "a.weight", torch.zeros(2, 3, dtype=torch.bfloat16).as_subclass(OnGpu), "rollout.trtllm"
    )
    try:
        launch = launch_of(TrtllmSection(python="python"))
        install(Contract.load(FILES[0]), child_environment({}, "", launch.environment))
        function, args = handle_of(message_of(frame({"type": "weights", **entry})[4:]), None)
    finally:
        uninstall()
        sys.modules.pop(EXTENSION, None)
    assert callable(function)
    assert names[DEVICE] == "storage_device"
    there = dict(zip(names, args, strict=True))
    older = b"\x02c" + bytes(range(64))
    assert there == {**given, "storage_device": None, "storage_handle": older}, "the engine puts its own device there"


def test_a_handle_of_a_newer_torch_becomes_one_that_the_engines_torch_reads() -> None:
    """torch 2.13 writes version 3, torch <= 2.12 refuses it; plain memory's bytes are the same in both."""
    driver = bytes(range(64))
    for given in (b"\x03c" + driver, b"\x04c" + driver):
        assert older_handle(given, "rollout.vllm") == b"\x02c" + driver
    for given in (b"\x02c" + driver, b"\x01e" + driver + b"more", driver):  # old enough, or without a version
        assert older_handle(given, "rollout.vllm") == given
    with pytest.raises(SyncError, match=r"set rollout\.vllm\.transport"):
        older_handle(b"\x03e" + driver, "rollout.vllm")
    with pytest.raises(SyncError, match="memory of kind 120"):
        older_handle(b"\x03x" + driver, "rollout.vllm")


def test_packed_tensors_are_copies_side_by_side() -> None:
    tensors = [
        ("a", torch.arange(3)),
        ("b", torch.ones(2, 2, dtype=torch.bfloat16).t()),
        ("c", torch.tensor(1.5)),
        ("d", torch.empty(0)),
    ]
    packed = list(pack_tensors(tensors))
    for (name, tensor), (other, copy) in zip(tensors, packed, strict=True):
        assert name == other
        assert torch.equal(tensor, copy)
        assert (tensor.dtype, tensor.shape) == (copy.dtype, copy.shape)
        assert copy.is_contiguous()
    base = packed[0][1].untyped_storage().data_ptr()
    assert all(copy.untyped_storage().data_ptr() == base for _, copy in packed), "one handle a call"
    tensors[0][1].zero_()
    assert packed[0][1].tolist() == [0, 1, 2], "the stream's memory may be used again"
    with pytest.raises(SyncError, match="cuda_ipc needs CUDA tensors"):
        ipc_entry(*packed[0], "rollout.vllm")
