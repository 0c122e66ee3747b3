"""The adapter against signatures that were recorded from TensorRT-LLM's sources, commit by commit."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trtllm_signatures import read_module

from megatron_tlt.backends.entries import DEVICE
from megatron_tlt.backends.trtllm.args import build_sampling_params
from megatron_tlt.types import SamplingParams
from tests.helpers.mpi import ROOT
from tests.helpers.trtllm_toy import SIGNATURES, names_of

HERE = ROOT / "megatron_tlt/backends/trtllm"
RECORDS = sorted(SIGNATURES.glob("*.json"))
WORKERS = [path for path in RECORDS if path.stem.startswith("rlhf_utils")]


def recorded(path: Path) -> dict[str, Any]:
    """Classes and functions of a record."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def ours() -> dict[str, Any]:
    return read_module((HERE / "extension.py").read_text())["classes"]["TrtllmWorkerExtension"]


def rpcs() -> set[str]:
    """Methods that the server calls in the engine's workers."""
    files = HERE / "server.py", HERE.parent / "serving.py"
    calls = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    calls = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "_rpc"]
    return {ast.literal_eval(call.args[0]) for call in calls}


def engine_calls() -> dict[str, set[str]]:
    """Methods of the engine that the server calls, with the names of their keyword arguments."""
    calls = [node for node in ast.walk(ast.parse((HERE / "server.py").read_text())) if isinstance(node, ast.Call)]
    found: dict[str, set[str]] = {}
    for call in calls:
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self._engine":
            found.setdefault(call.func.attr, set()).update(str(keyword.arg) for keyword in call.keywords)
    return found


def test_every_call_of_the_engine_is_a_method_in_the_sources() -> None:
    """`generate_async` is a method of its base, whose file is in no record."""
    known = recorded(SIGNATURES / "async_llm-0acd798d.json")["classes"]["AsyncLLM"]["methods"]
    calls = engine_calls()
    assert calls.keys() - known.keys() == {"generate_async"}
    for method in calls.keys() & known.keys():
        assert calls[method] <= known[method]["params"].keys(), method
    mapper = recorded(SIGNATURES / "auto_mapper-0b1d3205.json")["classes"]["AutoCheckpointMapper"]
    assert list(mapper["methods"]["get"]["params"])[:2] == ["format", "name"]


@pytest.mark.parametrize("path", WORKERS, ids=lambda p: p.stem)
def test_the_extension_reaches_only_what_the_engines_own_reaches(path: Path) -> None:
    """In every recorded release: `update_weights` of theirs, and the engine behind it."""
    there, mine = recorded(path)["classes"]["WorkerExtension"], ours()
    known = {*there["reached"], *there["methods"], *mine["methods"]}
    assert "engine.reset_prefix_cache" in mine["reached"]
    assert set(mine["reached"]) <= known
    assert there["replaced_arguments"] == {"device_id": DEVICE}, "the place in a handle that both put the device in"


def test_every_call_into_the_workers_is_a_method_of_ours_or_of_every_release() -> None:
    """`WorkerExtension.reset_prefix_cache` is in one of two recorded commits."""
    releases = [set(recorded(path)["classes"]["WorkerExtension"]["methods"]) for path in WORKERS]
    assert any("reset_prefix_cache" in methods for methods in releases)
    assert not all("reset_prefix_cache" in methods for methods in releases)
    assert rpcs() == {"tlt_update", "tlt_update_drafter", "tlt_reset_prefix_cache"}
    assert rpcs() <= set(ours()["methods"]) | set.intersection(*releases)


def test_every_sampling_parameter_is_a_field_in_the_sources() -> None:
    fields = recorded(next(p for p in RECORDS if p.stem.startswith("sampling_params")))["classes"]
    known = set(fields["SamplingParams"]["fields"])
    given = build_sampling_params(SamplingParams(max_tokens=8, min_p=0.1), (2,))
    assert {*given, "seed"} <= known


def test_the_decorator_is_used_bare_as_it_may_be() -> None:
    entry = recorded(next(p for p in RECORDS if p.stem.startswith("ray_utils")))
    assert entry["functions"]["control_action_decorator"]["params"] == {"func": "None", "drain": "True"}
    assert ours()["methods"]["tlt_update_drafter"]["decorators"] == ["control_action_decorator"]


SOURCE = """
class LLM:
    batch: int = Field(default=1, alias="Batch")
    def __init__(self, model: str, dtype: str = "auto", **kwargs): ...
    async def generate(self, inputs, *, seed=0): ...
class AsyncLLM(LLM):
    def release(self, tags): self.engine.free(tags)
"""


def test_a_record_has_signatures_and_no_code(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    command = [sys.executable, str(ROOT / "tools/trtllm_signatures.py"), str(tmp_path), "a.py"]
    subprocess.run([*command, "--commit", "0" * 40, "--out", str(tmp_path / "r.json")], check=True, timeout=60)
    text = (tmp_path / "r.json").read_text()
    assert len(text.splitlines()) == 8, "a class is a line"
    classes = json.loads(text)["classes"]
    assert classes["AsyncLLM"]["bases"] == ["LLM"]
    assert names_of("AsyncLLM", classes) == {"batch", "Batch"}
    assert classes["AsyncLLM"]["reached"] == ["engine", "engine.free"]
    start = classes["LLM"]["methods"]["__init__"]
    assert start == {"params": {"model": None, "dtype": "'auto'"}, "decorators": [], "takes_more": True}
    assert classes["LLM"]["methods"]["generate"]["params"] == {"inputs": None, "seed": "0"}
