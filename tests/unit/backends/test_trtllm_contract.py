"""The adapter against what is recorded of TensorRT-LLM: it uses the recorded names, and the tests notice any other."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from megatron_tlt.backends.trtllm_args import CLASSES
from tests.helpers.trtllm_adapter import run_adapter
from tests.helpers.trtllm_fake.contract import Contract

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "tests" / "contracts" / "trtllm").glob("*.json"))
THERE = ("wire", "trtllm_args", "trtllm_server", "trtllm_extension")  # modules of the engine's environment


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
    """So that the mutations cannot become few without a word."""
    used = {p.values[1] for p in MUTATIONS if p.values[0] == path}
    eagle = "EagleDecodingConfig" if path.stem.startswith("1.2") else "Eagle3DecodingConfig"
    assert {
        ("classes", "AsyncLLM"),
        ("classes", "AsyncLLM", "fields", "max_input_len"),
        ("classes", "AsyncLLM", "fields", "dtype", "literals", "bfloat16"),
        ("classes", "AsyncLLM", "methods", "generate_async", "params", "sampling_params"),
        ("classes", eagle, "fields", "allow_advanced_sampling"),
        ("classes", "NGramDecodingConfig", "fields", "max_matching_ngram_size"),
        ("classes", "CudaGraphConfig", "fields", "batch_sizes"),
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


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_record_says_where_it_is_from_and_how_far_it_is_trusted(path: Path) -> None:
    data = json.loads(path.read_text())
    entries = [
        *data["classes"].values(),
        *data["functions"].values(),
        *data["literals"].values(),
        data["stats"],
    ]
    entries += data["environment"].values()
    for entry in entries:
        assert entry["source"] in data["sources"]
        assert entry["trust"] in data["trust_marks"]
    assert data["version"] == path.stem
    assert {c for c in CLASSES if c in data["classes"]} >= {
        "KvCacheConfig",
        "CudaGraphConfig",
        "NGramDecodingConfig",
    }


def test_both_series_are_recorded() -> None:
    assert [f.stem[:3] for f in FILES] == ["1.2", "1.3"]


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
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
    }
    assert not [m for m in imported if m.split(".")[0] in ("megatron_tlt", "pydantic", "numpy", "mpi4py")]
    assert siblings <= set(THERE)
