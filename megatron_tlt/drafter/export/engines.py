"""Drafters in the layout of each serving engine.

SGLang and vLLM run drafters of kind eagle (EAGLE-1) for Llama and Qwen2 policies; TensorRT-LLM's PyTorch backend runs
EAGLE-3 only. Every engine runs eagle3. Engines leave a tensor that they do not find at its random start, or skip
one that they do not know, without a message: so names and config keys follow each engine's own loader, and
`docs/export_drafter.md` says where each rule was read. vLLM's CPU build has served both kinds; the others, none.

A layer id i of eagle3 means the OUTPUT of policy layer i, from 0. SGLang's ids mean the same (it adds 1 itself), vLLM's
count the layers before (i + 1), and TensorRT-LLM takes ours as an argument and not from a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_tlt.drafter.checkpoint import SavedDrafter, cast_tensors
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.config import DrafterConfig

Format = Literal["hf", "sglang", "trtllm", "vllm"]
FORMATS: tuple[Format, ...] = get_args(Format)
ENGINES = {"sglang": "SGLang", "trtllm": "TensorRT-LLM", "vllm": "vLLM"}
_INSTEAD = "train a drafter of kind eagle3, which every format takes, or use --format"


@dataclass(frozen=True, slots=True)
class ExportFiles:
    """One export, in memory: tensor files and JSON files by file name, and its README.md."""

    tensors: dict[str, dict[str, Tensor]]
    json: dict[str, dict[str, Any]]
    card: str = ""


def engine_files(drafter: SavedDrafter, engine: Format, dtype: torch.dtype) -> ExportFiles:
    """The files that `engine` reads. Raises ConfigError where it cannot run such a drafter."""
    config, named, name = drafter.config, layer_names(drafter.weights), str(dtype).removeprefix("torch.")
    if config.kind == "eagle3":
        json = {"config.json": _eagle3_config(config, engine, name)}
        if engine == "trtllm":
            json["speculative.json"] = {"eagle3_layers_to_capture": list(config.aux_layers)}
    else:
        _check_engine(config.policy, engine)
        json = {"config.json": _eagle_config(config.policy, engine, name)}
        if engine == "sglang":  # its fc always has a bias, and one that the file lacks stays random
            named["fc.bias"] = torch.zeros(config.policy.hidden_size)
    return ExportFiles({"model.safetensors": cast_tensors(named, dtype)}, json)


def layer_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the engines' names: a layer of kind eagle is their first; those of eagle3 are as they are."""
    return {n.replace("layer.", "layers.0.", 1) if n.startswith("layer.") else n: t for n, t in weights.items()}


def _check_engine(policy: ModelConfig, engine: Format) -> None:
    """Raises ConfigError where the engine has no model that computes what a drafter of kind eagle computes."""
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
        wanted = (
            f"SGLang's Qwen2 computes it as hidden_size / heads = {policy.hidden_size / policy.num_heads:g}"
        )
        raise ConfigError.of("head_dim", policy.head_dim, f"{wanted}: {_INSTEAD} vllm or hf")


def _eagle_config(policy: ModelConfig, engine: Format, dtype: str) -> dict[str, Any]:
    """config.json; `to_hf` has both old and new rope keys."""
    out = (
        policy.dense_sibling.to_hf(dtype)  # drafters are dense
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


def _eagle3_config(config: DrafterConfig, engine: Format, dtype: str) -> dict[str, Any]:
    """config.json: a Llama of one layer, whatever the policy is."""
    normed = {"norm_before_residual": True} if config.norm_before_residual else {}
    if normed and engine != "vllm":
        instead = "only vLLM has that form: use --format vllm, or train a drafter of ours"
        raise ConfigError.of("norm_before_residual", True, instead)
    out = config.layer.to_hf(dtype) | normed | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "tie_word_embeddings": False,  # the head is the drafter's own
        "bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "draft_vocab_size": config.draft_vocab_size,
    }
    eagle: dict[str, Any] = {"use_aux_hidden_state": True}
    if engine == "vllm":
        out["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in config.aux_layers]
    elif engine == "sglang":
        eagle["eagle_aux_hidden_state_layer_ids"] = list(config.aux_layers)
    return out | {"eagle_config": eagle}
