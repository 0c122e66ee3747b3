"""The engines of bench_rollout.py: this project's, transformers, and vLLM's CPU build, speculating in their own ways.

A side runs in a process of its own, vLLM's in vLLM's environment, so vendors are imported inside. Each function loads a
policy and returns a function that serves `Work`. All sample at temperature 1: this project's with keyed noise,
others with random numbers of their own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Work = dict[str, Any]  # {"first_id": int, "prompts": [[ids]], "samples": responses to each, "max_tokens", "eos": [ids]}
Response = dict[str, Any]  # {"seconds", "outputs": [[ids]], prompts' samples side by side, "drafts", "accepted"}
Run = Callable[[Work], Response]

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SUFFIX = {"method": "suffix"}  # as many tokens as it likes
EAGLE = {"method": "eagle", "num_speculative_tokens": 4}
MAX_RUNNING = 64


def ours(engine: str, kind: str, model: str, drafter: str, context: int, dtype: str, python: str) -> Run:
    """This project's rollouts with a drafter of `kind`: `embedded` with its default selector, or inside `vllm`, the one
    of the environment of `python`."""
    from megatron_tlt.backends.build import build_backend
    from megatron_tlt.backends.options import EngineOptions
    from megatron_tlt.backends.vllm.build import build_backend as build_vllm
    from megatron_tlt.config.model import ModelSection
    from megatron_tlt.config.rollout import RolloutSection, SyncSection
    from megatron_tlt.drafters.checkpoint import load_drafter
    from megatron_tlt.trainer.models import push_policy
    from megatron_tlt.types import GenerateCall, Prompt, SamplingParams

    speculation = {"drafter": kind, "drafter_path": None if kind == "none" else drafter}
    settings = {"backend": engine, "dtype": dtype, "max_running_requests": MAX_RUNNING, "speculation": speculation}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0"  # the engine's process inherits it
    section = RolloutSection.model_validate({**settings, "vllm": {"python": python}})
    policy = ModelSection(path=model, max_context=context)
    backend: Any
    if engine == "embedded":
        backend = build_backend(EngineOptions(section, policy))
    else:
        given = load_drafter(drafter) if section.speculation.trained else None
        backend = build_vllm(EngineOptions(section, policy, SyncSection(), device="cpu", drafter=given))
    push_policy(model, backend)

    def run(work: Work) -> Response:
        ends = {"stop_token_ids": tuple(work["eos"]), "ignore_eos": not work["eos"]}
        params = SamplingParams(max_tokens=work["max_tokens"], **ends)
        ids = range(work["first_id"], work["first_id"] + len(work["prompts"]))
        prompts = [Prompt(i, str(i), tuple(p), "") for i, p in zip(ids, work["prompts"])]
        started = time.perf_counter()
        samples = backend.generate(GenerateCall(prompts, params, work["samples"]))
        seconds = time.perf_counter() - started
        spec = backend.take_stats().speculation
        outputs = [s.token_ids for s in sorted(samples, key=lambda s: (s.prompt_id, s.sample_index))]
        return {"seconds": seconds, "outputs": outputs, "accept_length": spec.accept_length}

    return run


def vllm(
    speculation: dict[str, Any] | None,
    is_repaired: bool,
    is_eager: bool,
    model: str,
    drafter: str,
    context: int,
    dtype: str,
) -> Run:
    """vLLM's engine with one of its speculation methods, in this process; `is_eager`: without torch.compile."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM, SamplingParams

    from megatron_tlt.models.decoders.base import ENGINE_DTYPES

    if speculation is not None and is_repaired:
        repair_expand()
    if speculation is not None and speculation["method"] == "eagle":
        from megatron_tlt.backends.vllm.plugin import adapter

        adapter.register()  # vLLM has no EAGLE drafter of a Qwen3 policy
        speculation = {**speculation, "model": drafter}
    llm = LLM(
        model,
        dtype=ENGINE_DTYPES[dtype],
        skip_tokenizer_init=True,
        max_model_len=context,
        max_num_seqs=MAX_RUNNING,
        enforce_eager=is_eager,
        enable_prefix_caching=False,
        disable_log_stats=False,  # they count accepted drafts
        speculative_config=speculation,
    )

    def counters() -> tuple[float, float]:
        values = {m.name.removeprefix("vllm:spec_decode_"): getattr(m, "value", 0) for m in llm.get_metrics()}
        return values.get("num_drafts", 0), values.get("num_accepted_tokens", 0)

    def run(work: Work) -> Response:
        params = SamplingParams(
            temperature=1.0,
            max_tokens=work["max_tokens"],
            stop_token_ids=work["eos"],
            ignore_eos=True,  # the ends are among stop_token_ids
            detokenize=False,
        )
        requests = [{"prompt_token_ids": p} for p in work["prompts"] for _ in range(work["samples"])]
        drafts, accepted = counters()
        started = time.perf_counter()
        done = llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        drafts, accepted = (now - before for now, before in zip(counters(), (drafts, accepted)))
        outputs = [list(o.outputs[0].token_ids) for o in done]
        return {"seconds": seconds, "outputs": outputs, "accept_length": 1 + accepted / drafts if drafts else 0.0}

    return run


def transformers(model: str, dtype: str) -> Run:
    """`generate` on one left-padded batch, which runs until its longest response has ended."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    net = AutoModelForCausalLM.from_pretrained(model, dtype=kinds[dtype]).eval()
    net.generation_config.eos_token_id = None

    def run(work: Work) -> Response:
        prompts = [p for p in work["prompts"] for _ in range(work["samples"])]
        width, ends = max(map(len, prompts)), work["eos"]
        started = time.perf_counter()
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": work["max_tokens"]}
        with torch.inference_mode():
            rows = net.generate(ids, attention_mask=mask, pad_token_id=0, eos_token_id=ends or None, **how)
        seconds = time.perf_counter() - started
        outputs = []
        for row in rows[:, width:].tolist():
            end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            outputs.append(row[:end])
        return {"seconds": seconds, "outputs": outputs, "accept_length": 0.0}

    return run


def repair_expand() -> None:
    """Replaces vLLM 0.32's `expand_kernel` for CPUs, which fills a copy of its output (vllm#55005).

    Without it a drafted position's logits are divided by whatever memory holds, at any temperature above 0.
    """
    from vllm.utils import cpu_triton_utils

    def expand(output: Any, values: Any, ends: Any, old: float, new: float, MAX_NUM_TOKENS: int = 0) -> None:
        lengths = ends.diff(prepend=ends.new_zeros(1)).long()
        output.copy_(values.masked_fill(values == old, new).repeat_interleave(lengths))

    cpu_triton_utils._expand_kernel_impl = expand


def write_vllm_drafter(drafter: Path, folder: Path) -> None:
    """This project's drafter as the engine of `rollout.backend: vllm` reads it."""
    import torch

    from megatron_tlt.drafters.checkpoint import load_drafter, write_directory
    from megatron_tlt.drafters.registry import KINDS

    saved = load_drafter(drafter)
    files = KINDS[saved.config.kind].vllm_files(saved.config, saved.weights, torch.float32)
    write_directory(folder, files.tensors, files.json)


def load(side: str, model: str, drafter: str, context: int, is_eager: bool, dtype: str, python: str) -> Run:
    """The side of that name. `drafter`: the directory in the format of the side's engine; `is_eager`: as `vllm`;
    `python`: as `ours`."""
    if side in OURS:
        return ours(*OURS[side], model, drafter, context, dtype, python)
    if side == "transformers":
        return transformers(model, dtype)
    methods = {"plain": None, "ngram": NGRAM, "suffix": SUFFIX, "eagle": EAGLE}
    method, _, state = side.removeprefix("vllm ").partition(" ")
    return vllm(methods[method], state != "as-shipped", is_eager, model, drafter, context, dtype)


OURS = {  # engine and drafter
    "ours plain": ("embedded", "none"),
    "ours TLT": ("embedded", "eagle"),
    "ours plain in vllm": ("vllm", "none"),
    "ours TLT in vllm": ("vllm", "eagle"),
}
SIDES = (*OURS, "transformers", "vllm plain", "vllm ngram", "vllm suffix", "vllm eagle")
AS_SHIPPED = "vllm ngram as-shipped"
