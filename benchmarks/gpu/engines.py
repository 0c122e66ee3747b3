"""The embedded engine and vLLM with the same policy and drafter: tokens a second, plain and with drafts.

The policy is that of part `speculation`. vLLM runs in its own environment (`rollout.vllm.python`); without one this
part says so and compares nothing, nor does it with a vLLM for another device. Whichever engine a GPU finds faster may
become the default there.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.check import Check
from benchmarks.gpu.result import Result
from benchmarks.gpu.speculation import SAMPLES, SMOKE_SAMPLES, open_prompts, policy_and_drafter
from megatron_tlt.backends.build import build_backend
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.backends.vllm.build import build_backend as build_vllm
from megatron_tlt.backends.vllm.launch import find_python, setup_hint
from megatron_tlt.config.engine_process import VllmSection
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.drafters.checkpoint import load_drafter
from megatron_tlt.errors import BackendError
from megatron_tlt.interfaces import RolloutBackend
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.loader import iter_weights
from megatron_tlt.types import GenerateCall, WeightBucket

ENGINES: dict[str, Callable[[EngineOptions], RolloutBackend]] = {"vllm": build_vllm, "embedded": build_backend}
MODES: dict[str, dict[str, Any]] = {"off": {"drafter": "none"}, "on": {"drafter": "eagle", "selector": "cost_model"}}
CONTEXT = 512
MOST_MIB = 16384  # of a cache: 256 responses


def cache_mib(free: int) -> int:
    """MiB of an engine's cache where so many bytes of the device are free: half of them at most."""
    return min(MOST_MIB, free // 2**21)


def run(check: Check, found: Result) -> None:
    """One engine after the other at each batch size: both do not fit beside each other on a small GPU."""
    if find_python(VllmSection()) is None:
        found.note({"skipped": f"no vLLM: {setup_hint(check.device.type)}"})
        return
    batches, rounds = ([1, 4], 1) if check.smoke else ([1, 32, 256], 3)
    policy, drafter = policy_and_drafter(check)
    for engine in ENGINES:
        for mode in MODES:
            try:
                backend = open_side(check, engine, mode, (policy, drafter), max(batches))
            except BackendError as error:  # a build of vLLM for another device is one
                found.fail(str(error).partition("\n")[0])
                return
            for batch in batches:
                rate = tokens_per_second(check, backend, policy, batch, rounds)
                found.add_row({"engine": engine, "mode": mode, "batch": batch, "tokens_per_s": rate})
            backend.close()
            del backend
            gc.collect()
            if check.is_cuda:
                torch.cuda.empty_cache()  # the next engine may be another process's
    for batch in batches:
        rates = {(r["engine"], r["mode"]): r["tokens_per_s"] for r in found.rows if r["batch"] == batch}
        found.note({f"embedded_over_vllm_{m}_{batch}": rates["embedded", m] / rates["vllm", m] for m in MODES})


def open_side(
    check: Check, engine: str, mode: str, folders: tuple[Path, Path], batch: int, release_cache: bool = False
) -> RolloutBackend:
    """An engine with the weights of the policy."""
    policy, drafter = folders
    shape = ModelConfig.from_hf(policy)
    speculation = MODES[mode] | ({"drafter_path": str(drafter)} if mode == "on" else {})
    rollout = RolloutSection.model_validate(
        {
            "backend": engine,
            "dtype": check.dtype_name,
            "max_running_requests": batch,
            "max_batched_tokens": 8192 if check.is_cuda else 256,
            "kv_cache_mib": cache_mib(torch.cuda.mem_get_info(check.device)[0]) if check.is_cuda else 64,
            "speculation": speculation,
            "release_cache": release_cache,
        }
    )
    section = ModelSection(path=str(policy), max_context=CONTEXT)
    given = load_drafter(drafter, shape) if mode == "on" else None
    backend = ENGINES[engine](EngineOptions(rollout, section, device=check.device, drafter=given))
    push(backend, policy, 0)
    return backend


def push(backend: RolloutBackend, policy: Path, version: int) -> None:
    """Syncs the policy's weights. Mutates."""
    backend.begin_update(version)
    backend.update_weights(WeightBucket(version, list(iter_weights(policy, ModelConfig.from_hf(policy)))))
    backend.finish_update()


def tokens_per_second(check: Check, backend: RolloutBackend, policy: Path, batch: int, rounds: int) -> float:
    """Median over rounds of new prompts, after one that captures and compiles."""
    samples = SMOKE_SAMPLES if check.smoke else SAMPLES
    each = max(1, batch // samples)
    prompts, params = open_prompts(policy, each * (rounds + 1), 16 if check.smoke else 320)
    rates = []
    for turn in range(rounds + 1):
        call = GenerateCall(prompts[turn * each : (turn + 1) * each], params, samples if batch > 1 else 1)
        started = time.perf_counter()
        generated = sum(len(sample.token_ids) for sample in backend.generate(call))
        rates.append(generated / (time.perf_counter() - started))
    return statistics.median(rates[1:])
