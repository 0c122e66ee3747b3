"""benchmarks/gpu_check.py: the whole of it in small, without a GPU; and what a part that fails becomes."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu import decode, dspark, kernels, rl
from benchmarks.gpu.bounds import Device
from benchmarks.gpu.check import Check
from benchmarks.gpu.decode import open_engine
from benchmarks.gpu.engines import cache_mib
from benchmarks.gpu.result import Result
from megatron_tlt.config.checks.run import find_problems
from megatron_tlt.config.load import load_config
from megatron_tlt.config.planning.parameters import GIB
from megatron_tlt.config.rollout import KV_BLOCK
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.rollout.graph_pool import GraphPool
from megatron_tlt.trainer.device_memory import with_device_memory
from tests.helpers.mpi import ROOT, forking_python


@pytest.mark.nightly
@pytest.mark.slow
def test_every_line_runs_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Equal kernels, the same responses with TLT on and off, a drafter that was trained: or there would be failures."""
    out = tmp_path / "r.json"
    monkeypatch.setattr(sys, "executable", str(forking_python(tmp_path)))
    arguments = ["--device", "cpu", "--smoke", "--minutes", "60", "--out", str(out)]  # a busy machine is no failure
    assert gpu_check.main(arguments) == 0, capsys.readouterr().out
    record = json.loads(out.read_text())
    skipped = {part for part in ("engines", "vllm_cycle") if f"{part}/skipped" in record["summary"]}
    assert {row["part"] for row in record["rows"]} == {*gpu_check.PARTS} - {"versions"} - skipped
    summary = record["summary"]
    assert summary["failures"] == 0 and summary["rl/accept_length"] > 1
    assert summary["rl/same_responses"] == summary["exact/fp32_same_responses"] == 1.0
    assert summary["speculation/accept_length"] > 1 and summary["kernels/cases"] == len(
        [row for row in record["rows"] if row["part"] == "kernels"]
    )
    assert {f"{part}/seconds" for part in gpu_check.PARTS} <= summary.keys()


@pytest.mark.parametrize("gib", [8, 16, 24, 48, 80])
def test_an_engine_fits_where_little_is_free(gib: int):
    """A cache beside 2.5 GiB of weights, graphs and activations, and half a GiB of this process's own context."""
    free = (gib << 30) - (1 << 29)
    assert (cache_mib(free) << 20) + (3 * 2**30) < free
    assert gib < 40 or cache_mib(free) == 16384


def test_figures_of_a_batch_are_of_all_its_rows(tmp_path: Path):
    """The engine counts its drafter's states, too, when it sizes its cache; fewer rows than asked for are an error."""
    check = Check(torch.device("cpu"), True, gpu_check.RECIPE, tmp_path)
    policy, how = check.random_policy(), {"drafter": "dspark", "selector": "fixed", "draft_len": 4}
    backend = open_engine(check, policy, 8, 128, dspark.drafter(ModelConfig.from_hf(policy)), **how)
    assert backend.engine.runner.kv.num_blocks == 8 * 128 // KV_BLOCK + 1
    backend.engine.scheduler.blocks.allocate(4 * 128 // KV_BLOCK)
    with pytest.raises(RuntimeError, match="of 8 requests run"):
        dspark.measure(check, backend, 8, 60)


def test_a_forward_is_timed_without_its_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Or the pace of Python would be the forward's."""
    check, run, filled = Check(torch.device("cpu"), True, gpu_check.RECIPE, tmp_path), GraphPool.run, []
    backend = open_engine(check, check.random_policy(), 2, 64)
    monkeypatch.setattr(GraphPool, "run", lambda pool, batch: filled.append(batch) or run(pool, batch))
    stats = decode.pool_of(backend).graphs.stats
    before = stats.replays
    assert decode.forward_seconds(check, backend, 2, 32) > 0
    assert len(filled) == 1 and stats.replays - before > 20


def test_attention_is_timed_over_layers_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One layer is launched for longer than it runs."""
    check, seen = Check(torch.device("cpu"), True, gpu_check.RECIPE, tmp_path), set()
    monkeypatch.setattr(kernels.PagedPlan, "attend", lambda plan, q, keys, values: seen.add(keys.data_ptr()))
    monkeypatch.setattr(Check, "seconds", lambda check, call: [2.0 + bool(call())])
    monkeypatch.setattr(Check, "peaks", lambda check: Device(1.0, 1.0))
    of_layer = 2 * 2 * 64 * kernels.KV_HEADS * kernels.HEAD_DIM * 4
    assert kernels.attention_speed(check) == {"attention_of_bandwidth_2x64": of_layer / (2.0 / len(seen))}
    assert len(seen) == 2


def test_the_recipe_s_runs_take_the_memory_that_the_gpu_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A card of its class reports less than the recipe is planned for."""
    check = Check(torch.device("cuda"), False, gpu_check.RECIPE, tmp_path)
    (tmp_path / "policy-qwen2").mkdir()
    (tmp_path / "policy-qwen2/config.json").touch()  # made before: this machine cannot
    (tmp_path / "run.yaml").write_text(json.dumps(rl.settings(check, tmp_path, 1)))
    config = load_config(tmp_path / "run.yaml")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 22 * GIB))
    world: Any = SimpleNamespace(device=check.device, local_size=1, all_gather_object=lambda mine: [mine])
    config = with_device_memory(config, world)
    assert config.cluster.memory_gib == 22
    assert find_problems(config, check.shape().architecture, 1, "cuda") == []


@pytest.mark.parametrize("recipe", ["grpo-qwen2.5-0.5b-1n1g", "grpo-qwen3-30b-a3b-1n8g"])
def test_the_policy_has_the_shape_of_the_recipe(recipe: str, tmp_path: Path):
    check = Check(torch.device("cpu"), False, ROOT / f"configs/recipes/{recipe}.yaml", tmp_path)
    assert check.shape().architecture == check.config().model.architecture


@pytest.mark.parametrize(("norm", "says"), [(0.5, []), (0.25, ["bf16: gradients differ with TLT: "])])
def test_a_pair_that_must_agree_has_the_same_gradients(
    norm: float, says: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Weights of bf16 hide a difference for some steps: the same responses do not show it."""
    step = {"time/step": 1.0, "engine/generated_tokens": 3.0, "drafter/steps": 1.0, "responses": "d", "texts": ["a"]}
    rows = {"off": [step | {"policy/grad_norm": 0.5}], "on": [step | {"policy/grad_norm": norm}]}
    monkeypatch.setattr(rl, "launch", lambda *_: None)
    monkeypatch.setattr(rl, "read", lambda folder: rows[folder.name.rpartition("-")[2]])
    found = Result()
    rl.judge(Check(torch.device("cuda"), False, gpu_check.RECIPE, tmp_path), rl.Pair("bf16", 1, {}, True), found)
    assert [text.partition("their")[0] for text in found.failures] == says


def test_a_part_that_fails_is_named_behind_the_figures_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A recipe that is not there ends one part; the other still has its figures."""
    out = tmp_path / "r.json"
    monkeypatch.setattr(sys, "executable", str(forking_python(tmp_path)))
    arguments = ["--device", "cpu", "--smoke", "--recipe", str(tmp_path / "none.yaml")]
    assert gpu_check.main([*arguments, "--parts", "update", "versions", "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert printed.index("copy_gb_s") < printed.index("FAILED  update: ended with 1: ")
    assert "none.yaml" in printed.partition("FAILED")[2]
    record = json.loads(out.read_text())
    assert record["summary"]["failures"] == 1 and record["summary"]["versions/copy_gb_s"] > 0
    assert next(row for row in record["rows"] if "failure" in row)["part"] == "update"


def test_a_part_has_no_variable_of_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """srun names a descriptor of PMI by them that a part does not have."""
    started: list[dict[str, str]] = []

    def start(command: list[str], env: dict[str, str], **_: Any) -> Any:
        started.append(env)
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(gpu_check, "subprocess", SimpleNamespace(Popen=start, STDOUT=0))
    for name in ("PMI_FD", "PMI_RANK", "SLURM_STEP_ID", "PMIX_RANK", "MPI4PY_LIBMPI"):
        monkeypatch.setenv(name, "3")
    args = gpu_check.parse_arguments(["--device", "cpu", "--smoke"])
    assert gpu_check.run_part(args, "versions", tmp_path, 1.0)["failures"] == []
    assert [name for name in started[0] if name.startswith(("PMI", "SLURM_", "MPI"))] == ["MPI4PY_LIBMPI"]


def imports(body: list[ast.stmt]) -> Iterator[str]:
    """Names that statements import where a module is loaded; of `from a import b` also a.b, which may be a module."""
    for node in body:
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0):  # relative ones lead to no other package
                yield from (module, *(f"{module}.{alias.name}" for alias in node.names))
            case ast.If() if "TYPE_CHECKING" not in ast.dump(node.test):
                yield from imports([*node.body, *node.orelse])
            case ast.Try():  # what is in one may be absent
                yield from imports(node.orelse)


def third_party(starts: list[str]) -> dict[str, str]:
    """Top-level packages of others that modules of this repository import when they are loaded, with one that does."""
    found: dict[str, str] = {}
    seen, waiting = set(), [*starts]
    while waiting:
        name = waiting.pop()
        file = ROOT / f"{name.replace('.', '/')}.py"
        if name in seen or not file.is_file():
            continue
        seen.add(name)
        for imported in imports(ast.parse(file.read_text()).body):
            top = imported.partition(".")[0]
            if top in ("benchmarks", "megatron_tlt"):
                waiting.append(imported)
            elif top not in sys.stdlib_module_names:
                found.setdefault(top, name)
    return found


def test_a_machine_without_network_gets_every_package_that_the_check_imports():
    """From the wheels of `make gpu-wheels`, or in the image that the page asks for."""
    names = re.search(r"^WHEELS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    page = (ROOT / "docs/guides/gpu_check.md").read_text()
    image = re.search(r"an image that has (.*?) already", page, re.S)
    assert names is not None and image is not None
    there = {name.replace("\\", "") for name in names[1].split("|")} | set(re.findall(r"[\w-]+", image[1]))
    there = {name.lower().replace("_", "-") for name in there}
    parts = [f"benchmarks.gpu.{path.stem}" for path in (ROOT / "benchmarks/gpu").glob("*.py")]
    needed = third_party([*parts, "benchmarks.gpu_check", "megatron_tlt.trainer.preflight", "megatron_tlt.trainer.job"])
    packages = packages_distributions()
    absent = {
        name: by
        for name, by in needed.items()
        if there.isdisjoint(package.lower().replace("_", "-") for package in packages[name])
    }
    assert len(needed) > 8 and absent == {}
