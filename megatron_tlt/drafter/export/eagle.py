"""A trained drafter in the layout of the engine that will serve with it. Pure: weights and config in, files out.

| format | drafter of kind eagle | of kind eagle3 |
|---|---|---|
| hf | our own directory with a card | the same |
| sglang | Llama and Qwen2 policies | any policy |
| vllm | Llama and Qwen2 policies | any policy |
| trtllm | never: its PyTorch backend runs EAGLE-3 only | any policy |

What an engine cannot run is refused by name. Engines leave a tensor that they do not find at its random start, or skip
one that they do not know, without a word: so names and config keys here follow each engine's own loader, and
`docs/export_drafter.md` says where each rule was read. Nothing here has met a real engine yet.

Legend: H hidden size, V vocabulary, Vd the drafter's vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_tlt.drafter.export.model_card import eagle_card
from megatron_tlt.errors import CheckpointError, ConfigError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.model import check_eagle_tensors

Format = Literal["hf", "sglang", "trtllm", "vllm"]
FORMATS: tuple[Format, ...] = get_args(Format)
ENGINES = {"sglang": "SGLang", "trtllm": "TensorRT-LLM", "vllm": "vLLM"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_INSTEAD = "train a drafter of kind eagle3, which every format takes, or use --format"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a drafter comes from, for its card."""

    policy_version: int = 0
    trained_steps: int = 0


@dataclass(frozen=True, slots=True)
class ExportFiles:
    """One export, in memory: tensor files, JSON files and the card, by file name."""

    tensors: dict[str, dict[str, Tensor]]
    json: dict[str, dict[str, Any]]
    card: str
    origin: Origin = field(default_factory=Origin)


def parse_format(value: str) -> Format:
    """Raises ConfigError for anything but one of `FORMATS`."""
    for known in FORMATS:
        if value == known:
            return known
    raise ConfigError.of("format", value, f"must be one of {', '.join(FORMATS)}")


def parse_dtype(value: str) -> torch.dtype:
    """Raises ConfigError for anything but one of `DTYPES`."""
    if value not in DTYPES:
        raise ConfigError.of("dtype", value, f"must be one of {', '.join(DTYPES)}")
    return DTYPES[value]


def export_eagle(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    kind: Format,
    dtype: torch.dtype = torch.bfloat16,
    origin: Origin | None = None,
    tables: Mapping[str, Tensor] | None = None,
) -> ExportFiles:
    """The drafter of a policy of shape `config` (`eagle_parameter_shapes`) for the engine `kind`.

    `tables` are the policy's `embed_tokens.weight` and `lm_head.weight` [V, H]: hf only, to make the directory
    complete in itself. Raises ConfigError where the engine cannot run such a drafter, CheckpointError for wrong
    tensors.
    """
    check_eagle_format(config, kind)
    check_eagle_tensors(weights, config)
    if tables and kind != "hf":
        raise ConfigError.of(
            "policy", "...", f"{ENGINES[kind]} shares the policy's tables: only hf takes copies"
        )
    origin = origin or Origin()
    card = eagle_card(config, kind, dtype, origin.policy_version, origin.trained_steps, bool(tables))
    name = str(dtype).removeprefix("torch.")
    if kind == "hf":
        about = {
            "drafter": "eagle",
            "policy_version": origin.policy_version,
            "trained_steps": origin.trained_steps,
        }
        files = {"drafter.safetensors": cast_tensors(weights, dtype)}
        if tables:
            files["policy_tables.safetensors"] = cast_tensors(_checked_tables(tables, config), dtype)
        return ExportFiles(files, {"config.json": {**about, **config.to_hf(name)}}, card, origin)
    named = {eagle_engine_name(n): t for n, t in weights.items()}
    if kind == "sglang":  # its fc always has a bias, and one that the file lacks stays random
        named["fc.bias"] = torch.zeros(config.hidden_size)
    tensors = {"model.safetensors": cast_tensors(named, dtype)}
    return ExportFiles(tensors, {"config.json": eagle_engine_config(config, kind, name)}, card, origin)


def check_eagle_format(config: ModelConfig, kind: Format) -> None:
    """Raises ConfigError where the engine has no model that computes what this drafter computes."""
    if kind == "trtllm":
        raise ConfigError.of(
            "format",
            kind,
            "TensorRT-LLM's PyTorch backend runs EAGLE-3 drafters only, and this one is of kind eagle (EAGLE-1): "
            f"{_INSTEAD} sglang, vllm (Llama and Qwen2 policies) or hf",
        )
    if kind == "hf":
        return
    if config.qk_norm:
        raise ConfigError.of(
            "format",
            kind,
            f"{ENGINES[kind]} has no EAGLE-1 drafter whose attention normalises queries and keys, as that of a "
            f"{config.family} policy does: {_INSTEAD} hf",
        )
    if kind == "sglang" and config.qkv_bias and config.head_dim * config.num_heads != config.hidden_size:
        allowed = (
            f"SGLang's Qwen2 computes it as hidden_size / heads = {config.hidden_size / config.num_heads:g}"
        )
        raise ConfigError.of("head_dim", config.head_dim, f"{allowed}: {_INSTEAD} vllm or hf")


def eagle_engine_name(name: str) -> str:
    """A tensor's name in SGLang's and vLLM's EAGLE-1 files: no prefix, the layer is `layers.0`."""
    return name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name


def eagle_engine_config(config: ModelConfig, kind: Format, dtype: str) -> dict[str, Any]:
    """config.json of an EAGLE-1 drafter: `to_hf` has both old and new rope keys."""
    out = (
        config.to_hf(dtype)
        | {
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,  # both engines put the policy's tables in; a tied head would go with them
            "bias": False,
            "attention_bias": False,
        }
    )
    if kind == "sglang":
        out["architectures"] = ["Qwen2ForCausalLMEagle" if config.qkv_bias else "LlamaForCausalLMEagle"]
        return out
    # vLLM puts "Eagle" before it and has EagleLlamaForCausalLM; `qkv_bias` gives q, k and v a bias and o_proj none.
    return out | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "qkv_bias": config.qkv_bias}


def cast_tensors(named: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Contiguous CPU copies; integers keep their type. Raises CheckpointError for a value that is not finite."""
    out = {}
    for name, tensor in named.items():
        stored = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        if stored.is_floating_point() and not bool(torch.isfinite(stored).all()):
            raise CheckpointError(
                f"{name} has values that are not finite in {str(dtype).removeprefix('torch.')}"
            )
        out[name] = stored.contiguous().clone()
    return out


def _checked_tables(tables: Mapping[str, Tensor], config: ModelConfig) -> Mapping[str, Tensor]:
    shape = (config.vocab_size, config.hidden_size)
    wanted = ("embed_tokens.weight", "lm_head.weight")
    if set(tables) != set(wanted) or any(tuple(t.shape) != shape for t in tables.values()):
        given = {name: tuple(t.shape) for name, t in tables.items()}
        raise CheckpointError(
            f"the policy's tables must be {' and '.join(wanted)} of shape {shape}, not {given}"
        )
    return tables
