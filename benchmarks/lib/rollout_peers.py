"""The engines of proof_vllm.py, this project's and vLLM's CPU build, each speculating in its own ways.

A side runs in a process of its own, vLLM's in vLLM's environment, so vendors are imported inside. Each function loads a
policy and returns a function that answers `Work`. All sample at temperature 1 in fp32, each with random numbers of its
own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Work = dict[
    str, Any
]  # {"first_id": int, "prompts": [[ids]], "samples": answers to each, "max_tokens", "eos": [ids]}
Answer = dict[
    str, Any
]  # {"seconds", "outputs": [[ids]], prompts' samples side by side, "drafts", "accepted"}
Run = Callable[[Work], Answer]

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SUFFIX = {"method": "suffix"}  # as many tokens as it likes
EAGLE = {"method": "eagle", "num_speculative_tokens": 4}
MAX_RUNNING = 64


def embedded(kind: str, model: str, drafter: str, context: int) -> Run:
    """This project's engine with its default selector; `kind` is a drafter's."""
    from megatron_tlt.backends.build import build_backend
    from megatron_tlt.config.load import load_engine
    from megatron_tlt.config.model import ModelSection
    from megatron_tlt.types import Prompt, SamplingParams

    options = [f"rollout.speculation.drafter={kind}", f"rollout.max_running_requests={MAX_RUNNING}"]
    if kind != "none":
        options.append(f"rollout.speculation.drafter_path={drafter}")
    section = load_engine(options)
    backend = build_backend(section, ModelSection(path=model, max_context=context), load_weights=True)

    def run(work: Work) -> Answer:
        params = SamplingParams(max_tokens=work["max_tokens"], stop_token_ids=tuple(work["eos"]))
        ids = range(work["first_id"], work["first_id"] + len(work["prompts"]))
        prompts = [Prompt(i, str(i), tuple(p), "") for i, p in zip(ids, work["prompts"])]
        started = time.perf_counter()
        samples = backend.generate(prompts, params, work["samples"])
        seconds = time.perf_counter() - started
        spec = backend.take_stats().speculation
        samples = sorted(samples, key=lambda s: (s.prompt_id, s.sample_index))
        outputs = [s.token_ids for s in samples]
        return {"seconds": seconds, "outputs": outputs, "accept_length": spec.accept_length}

    return run


def vllm(
    speculation: dict[str, Any] | None,
    is_repaired: bool,
    is_eager: bool,
    model: str,
    drafter: str,
    context: int,
) -> Run:
    """vLLM's engine with one of its speculation methods, in this process; `is_eager`: without torch.compile."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM, SamplingParams

    if speculation is not None and is_repaired:
        repair_expand()
    if speculation is not None and speculation["method"] == "eagle":
        add_qwen3_drafter()
        speculation = {**speculation, "model": drafter}
    llm = LLM(
        model,
        dtype="float32",
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

    def run(work: Work) -> Answer:
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
        return {
            "seconds": seconds,
            "outputs": outputs,
            "accept_length": 1 + accepted / drafts if drafts else 0.0,
        }

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


def add_qwen3_drafter() -> None:
    """Makes vLLM's EAGLE drafter of one Llama layer one of a Qwen3 layer, whose attention normalises queries and keys.

    vLLM 0.32 has the class for Llama only.
    """
    from torch import nn
    from vllm.model_executor.models import llama_eagle
    from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer
    from vllm.model_executor.models.utils import get_draft_quant_config

    class Layer(Qwen3DecoderLayer):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, is_first: bool, prefix: str, config: Any):
            quantization = get_draft_quant_config(vllm_config)
            super().__init__(config, vllm_config.cache_config, quantization, prefix=prefix)
            if is_first:
                self.input_layernorm = nn.Identity()

    llama_eagle.LlamaDecoderLayer = Layer


def write_vllm_drafter(drafter: Path, folder: Path) -> None:
    """This project's drafter of a Qwen3 policy as `add_qwen3_drafter` reads it.

    `megatron-tlt drafter export` refuses it, rightly: an unchanged vLLM has no class for it.
    """
    from megatron_tlt.drafter.checkpoint import load_drafter, write_directory

    saved = load_drafter(drafter)
    assert saved.config.kind == "eagle"
    config = saved.config.policy.to_hf("float32") | {
        "architectures": ["LlamaForCausalLM"],  # vLLM puts Eagle before it
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,  # vLLM shares the policy's tables with a drafter that has none
    }
    tensors = {
        name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name: tensor
        for name, tensor in saved.weights.items()
    }
    write_directory(folder, {"model.safetensors": tensors}, {"config.json": config})


def load(side: str, model: str, drafter: str, context: int, is_eager: bool) -> Run:
    """The side of that name. `drafter`: the directory in the format of the side's engine; `is_eager`: as `vllm`."""
    engine, _, kind = side.partition(" ")
    if engine == "ours":
        return embedded({"plain": "none", "TLT": "hybrid"}[kind], model, drafter, context)
    methods = {"plain": None, "ngram": NGRAM, "suffix": SUFFIX, "eagle": EAGLE}
    method, _, state = kind.partition(" ")
    return vllm(methods[method], state != "as-shipped", is_eager, model, drafter, context)


SIDES = ("ours plain", "ours TLT", "vllm plain", "vllm ngram", "vllm suffix", "vllm eagle")
AS_SHIPPED = "vllm ngram as-shipped"
