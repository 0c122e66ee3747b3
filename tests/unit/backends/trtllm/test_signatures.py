"""The adapter and its contracts against signatures that were recorded from TensorRT-LLM's sources, commit by commit."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from trtllm_signatures import names_of, read_module

from megatron_tlt.backends.entries import DEVICE
from megatron_tlt.backends.trtllm.args import Eagle3Files, build_llm_kwargs, build_sampling_params
from megatron_tlt.backends.trtllm.server import CLASS
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.config.trtllm import TrtllmSection
from megatron_tlt.types import SamplingParams
from tests.helpers.mpi import ROOT
from tests.helpers.trtllm_engines import CONTRACTS

HERE = ROOT / "megatron_tlt/backends/trtllm"
RECORDS = sorted((CONTRACTS / "signatures").glob("*.json"))
WORKERS = [path for path in RECORDS if path.stem.startswith("rlhf_utils")]
CLASSES = {"rlhf_utils": "WorkerExtension", "async_llm": "AsyncLLM", "auto_mapper": "AutoCheckpointMapper"}


def recorded(path: Path) -> dict[str, Any]:
    """Classes and functions of a record's only file."""
    (entry,) = json.loads(path.read_text())["files"].values()
    return entry


def ours() -> dict[str, Any]:
    return read_module((HERE / "extension.py").read_text())["classes"]["TltWorkerExtension"]


def rpcs() -> set[str]:
    """Methods that the server calls in the engine's workers."""
    tree = ast.parse((HERE / "server.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "collective_rpc"]
    return {ast.literal_eval(call.args[0]) for call in calls}


@pytest.mark.parametrize("contract", sorted(CONTRACTS.glob("*.json")), ids=lambda p: p.stem)
@pytest.mark.parametrize(
    "path", [p for p in RECORDS if p.stem.split("-")[0] in CLASSES], ids=lambda p: p.stem
)
def test_the_contracts_methods_are_in_the_sources(contract: Path, path: Path) -> None:
    name = CLASSES[path.stem.split("-")[0]]
    there = recorded(path)["classes"][name]
    said = json.loads(contract.read_text())["classes"][name]
    compared = 0
    for method, entry in said["methods"].items():
        if method not in there["methods"] and there["bases"]:
            continue  # a base's, in another file
        assert list(entry["params"]) == list(there["methods"][method]["params"]), method
        compared += 1
    assert compared
    assert set(said.get("attributes", {})) <= set(there["reached"])


@pytest.mark.parametrize("path", WORKERS, ids=lambda p: p.stem)
def test_the_extension_reaches_only_what_the_engines_own_reaches(path: Path) -> None:
    """In every recorded release: `update_weights` of theirs, and the engine behind it."""
    there, mine = recorded(path)["classes"]["WorkerExtension"], ours()
    known = {*there["reached"], *there["methods"], *mine["methods"]}
    assert "engine.reset_prefix_cache" in mine["reached"]
    assert set(mine["reached"]) <= known
    assert there["replaced_arguments"] == {"device_id": DEVICE}, (
        "the place in a handle that both put the device in"
    )


def test_every_call_into_the_workers_is_a_method_of_ours_or_of_every_release() -> None:
    """`WorkerExtension.reset_prefix_cache` is in one of two recorded commits."""
    releases = [set(recorded(path)["classes"]["WorkerExtension"]["methods"]) for path in WORKERS]
    assert any("reset_prefix_cache" in methods for methods in releases)
    assert not all("reset_prefix_cache" in methods for methods in releases)
    assert rpcs() == {"tlt_update", "tlt_update_drafter", "tlt_reset_prefix_cache"}
    assert rpcs() <= set(ours()["methods"]) | set.intersection(*releases)


@pytest.mark.parametrize(
    ("record", "version"), [("llm_args-2026-02", "1.2.1"), ("llm_args-late-1.3", "1.3.0rc27")]
)
def test_every_argument_is_a_field_in_the_sources(record: str, version: str) -> None:
    """Sources of February 2026, which still have what 1.2 has, and of late 1.3; the classes forbid other arguments."""
    sources = recorded(CONTRACTS / f"signatures/{record}.json")["classes"]
    known = {name: names_of(name, {n: [entry] for n, entry in sources.items()})["fields"] for name in sources}
    section = TrtllmSection(python="p", version=version, sleep="kv_cache")
    rollout = RolloutSection(dtype="bf16", trtllm=section)
    given = build_llm_kwargs(rollout, ModelSection(path="/m"), Eagle3Files(Path("/d"), (1, 2, 3)))
    assert {*given} - known["TorchLlmArgs"] <= {"enable_sleep"}  # 1.2's, gone by February
    for value in (v for v in given.values() if isinstance(v, dict)):
        assert {*value} - {CLASS} <= known[value[CLASS]]
    said = json.loads((CONTRACTS / f"{version}.json").read_text())["classes"]
    for name in ("CudaGraphConfig", "KvCacheConfig"):
        assert set(said[name]["fields"]) <= known[name], name
    assert set(said["AsyncLLM"]["fields"]) - {"enable_sleep"} <= known["TorchLlmArgs"]


def test_every_sampling_parameter_is_a_field_in_the_sources() -> None:
    fields = recorded(next(p for p in RECORDS if p.stem.startswith("sampling_params")))["classes"]
    known = set(fields["SamplingParams"]["fields"])
    given = build_sampling_params(SamplingParams(max_tokens=8, min_p=0.1), (2,))
    assert {*given, "seed"} <= known
    for contract in CONTRACTS.glob("*.json"):
        said = json.loads(contract.read_text())["classes"]["SamplingParams"]["fields"]
        assert set(said) <= known, contract.name


def test_the_decorator_is_used_bare_as_it_may_be() -> None:
    entry = recorded(next(p for p in RECORDS if p.stem.startswith("ray_utils")))
    assert entry["functions"]["control_action_decorator"]["params"] == {"func": "None", "drain": "True"}
    assert ours()["methods"]["tlt_update_drafter"]["decorators"] == ["control_action_decorator"]
