"""Arguments for TensorRT-LLM by version. test_signatures.py checks that the names exist."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.backends.trtllm.args import Eagle3Files, build_llm_kwargs, build_sampling_params, build_spec_config
from megatron_tlt.backends.trtllm.server import CLASS
from megatron_tlt.config.engine_process import TrtllmSection
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.types import SamplingParams

MODEL = ModelSection(path="/m", max_context=4096)
DRAFTER = Eagle3Files(Path("/d"), (30, 1, 14))
SAMPLING = SamplingParams(temperature=0.7, max_tokens=16, stop_token_ids=(7, 2, 7))


def kwargs(
    version: str = "1.2.1", graph_memory_mib: int = 2048, release_cache: bool = True, **fields: Any
) -> dict[str, Any]:
    """Arguments for a section of TensorRT-LLM's own with `fields`."""
    section = TrtllmSection(kv_cache_fraction=0.4, **fields)
    rollout = RolloutSection(
        dtype="bf16",
        max_running_requests=128,
        max_batched_tokens=8192,
        graph_memory_mib=graph_memory_mib,
        release_cache=release_cache,
        trtllm=section,
    )
    return build_llm_kwargs(rollout, MODEL, version)


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc27"])
def test_limits_are_always_passed(version: str) -> None:
    given = kwargs(version=version)
    assert given["max_input_len"] == given["max_seq_len"] == 4096
    assert (given["max_batch_size"], given["max_num_tokens"]) == (128, 8192)
    assert given["dtype"] == "bfloat16"
    assert given["enable_iter_perf_stats"] is True
    assert given["kv_cache_config"]["free_gpu_memory_fraction"] == 0.4
    assert "speculative_config" not in given


def test_graphs_have_a_maximum() -> None:
    base = {CLASS: "CudaGraphConfig", "enable_padding": True}
    assert kwargs()["cuda_graph_config"] == {**base, "max_batch_size": 128}
    assert kwargs(graph_memory_mib=0)["cuda_graph_config"] is None


def test_free_fields_add_and_never_replace() -> None:
    assert kwargs(engine={"attn_backend": "FLASHINFER"})["attn_backend"] == "FLASHINFER"
    rollout = RolloutSection(release_cache=True)
    given = {*build_llm_kwargs(rollout, MODEL, "1.2.1", DRAFTER), *build_llm_kwargs(rollout, MODEL, "1.3.0")}
    assert given <= TrtllmSection.taken.keys(), "`check` refuses them"


def test_eagle3_samples_with_the_temperature() -> None:
    old, new = (build_spec_config(5, version, DRAFTER) for version in ("1.2.1", "1.3.0"))
    assert old is not None
    assert new is not None
    assert (old[CLASS], new[CLASS]) == ("EagleDecodingConfig", "Eagle3DecodingConfig")
    for config in (old, new):
        assert config["allow_advanced_sampling"] is True
        assert (config["max_draft_len"], config["speculative_model"]) == (5, "/d")
        assert config["eagle3_layers_to_capture"] == [1, 14, 30]
    assert old["eagle3_one_model"] is True
    assert "eagle3_one_model" not in new


def test_sampling_is_passed_whole_and_without_log_probs() -> None:
    given = build_sampling_params(SAMPLING, ())
    assert given == {
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 1.0,
        "max_tokens": 16,
        "end_id": -1,
        "stop_token_ids": [2, 7],
        "include_stop_str_in_output": True,
        "detokenize": False,
    }
    assert sampled(min_p=0.1)["min_p"] == 0.1
    assert sampled(stop_token_ids=())["stop_token_ids"] == [3]
    assert sampled(stop_token_ids=(), ignore_eos=True)["stop_token_ids"] is None


def sampled(**fields: Any) -> dict[str, Any]:
    return build_sampling_params(replace(SAMPLING, **fields), (3,))


def test_greedy_is_the_one_most_likely_token() -> None:
    given = sampled(temperature=0, top_p=0.5, min_p=0.2)
    assert (given["temperature"], given["top_k"], given["top_p"]) == (1.0, 1, 1.0)
    assert "min_p" not in given
