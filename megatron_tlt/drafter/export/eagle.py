"""Export of a drafter of kind eagle (EAGLE-1) for the engines that can serve it.

SGLang and vLLM run it for Llama and Qwen2 policies; TensorRT-LLM's PyTorch backend runs EAGLE-3 only. Engines leave a
tensor that they do not find at its random start, or skip one that they do not know, without a message: so names and
config keys follow each engine's own loader, and `docs/export_drafter.md` says where each rule was read. Nothing here
has been run in a real engine yet.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_tlt.drafter.checkpoint import SavedDrafter, cast_tensors
from megatron_tlt.drafter.export.files import ENGINES, ExportFiles, Format
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.config import ModelConfig

_INSTEAD = "train a drafter of kind eagle3, which every format takes, or use --format"


def eagle_engine_files(drafter: SavedDrafter, engine: Format, dtype: torch.dtype) -> ExportFiles:
    """The files that `engine` reads. Raises ConfigError where it cannot run such a drafter."""
    policy = drafter.shape
    assert isinstance(policy, ModelConfig)
    _check_engine(policy, engine)
    named = {_engine_name(n): t for n, t in drafter.weights.items()}
    if engine == "sglang":  # its fc always has a bias, and one that the file lacks stays random
        named["fc.bias"] = torch.zeros(policy.hidden_size)
    config = _engine_config(policy, engine, str(dtype).removeprefix("torch."))
    return ExportFiles({"model.safetensors": cast_tensors(named, dtype)}, {"config.json": config})


def _check_engine(policy: ModelConfig, engine: Format) -> None:
    """Raises ConfigError where the engine has no model that computes what this drafter computes."""
    if engine == "trtllm":
        raise ConfigError.of(
            "format",
            engine,
            "TensorRT-LLM's PyTorch backend runs EAGLE-3 drafters only, and this one is of kind eagle (EAGLE-1): "
            f"{_INSTEAD} sglang, vllm (Llama and Qwen2 policies) or hf",
        )
    if policy.qk_norm:
        raise ConfigError.of(
            "format",
            engine,
            f"{ENGINES[engine]} has no EAGLE-1 drafter whose attention normalises queries and keys, as that of a "
            f"{policy.family} policy does: {_INSTEAD} hf",
        )
    if engine == "sglang" and policy.qkv_bias and policy.head_dim * policy.num_heads != policy.hidden_size:
        allowed = (
            f"SGLang's Qwen2 computes it as hidden_size / heads = {policy.hidden_size / policy.num_heads:g}"
        )
        raise ConfigError.of("head_dim", policy.head_dim, f"{allowed}: {_INSTEAD} vllm or hf")


def _engine_name(name: str) -> str:
    """A tensor's name in SGLang's and vLLM's files: no prefix, the layer is `layers.0`."""
    return name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name


def _engine_config(policy: ModelConfig, engine: Format, dtype: str) -> dict[str, Any]:
    """config.json; `to_hf` has both old and new rope keys."""
    out = (
        policy.to_hf(dtype)
        | {
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,  # both engines put the policy's tables in; a tied head would go with them
            "bias": False,
            "attention_bias": False,
        }
    )
    if engine == "sglang":
        return out | {
            "architectures": ["Qwen2ForCausalLMEagle" if policy.qkv_bias else "LlamaForCausalLMEagle"]
        }
    # vLLM puts "Eagle" before it and has EagleLlamaForCausalLM; `qkv_bias` gives q, k and v a bias and o_proj none.
    return out | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "qkv_bias": policy.qkv_bias}
