"""Exports of a drafter of kind eagle3: one set of tensors, and what each engine wants to be told about layers.

A layer id i of ours means the OUTPUT of policy layer i, from 0. SGLang's ids mean the same (it adds 1 itself), vLLM's
count the layers before (i + 1), and TensorRT-LLM takes ours as an argument and not from a file.

Legend: Vd the drafter's vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megatron_tlt.drafter.export.eagle import ExportFiles, Format, Origin, cast_tensors
from megatron_tlt.drafter.export.model_card import eagle3_card
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.eagle3 import Eagle3Config, check_eagle3_tensors

KIND3 = "eagle3"


def export_eagle3(
    config: Eagle3Config,
    weights: Mapping[str, Tensor],
    kind: Format,
    dtype: torch.dtype = torch.bfloat16,
    origin: Origin | None = None,
) -> ExportFiles:
    """The files of a drafter with the tensors of `Eagle3Config.shapes`. Raises CheckpointError for wrong tensors."""
    check_eagle3_tensors(weights, config)
    origin = origin or Origin()
    card = eagle3_card(config, kind, dtype, origin.policy_version, origin.trained_steps)
    name, layers = str(dtype).removeprefix("torch."), list(config.layers)
    tensors = cast_tensors(weights, dtype)
    if kind == "hf":
        about = {
            "drafter": KIND3,
            "policy_version": origin.policy_version,
            "trained_steps": origin.trained_steps,
        }
        about |= {"eagle3_layers": layers, "draft_vocab_size": config.draft_vocab_size}
        json = {"config.json": {**about, **config.policy.to_hf(name)}}
        return ExportFiles({"drafter.safetensors": tensors}, json, card, origin)
    json = {"config.json": eagle3_engine_config(config, kind, name)}
    if kind == "trtllm":
        json["speculative.json"] = {"eagle3_layers_to_capture": layers}
    return ExportFiles({"model.safetensors": tensors}, json, card, origin)


def eagle3_engine_config(config: Eagle3Config, kind: Format, dtype: str) -> dict[str, Any]:
    """config.json: a Llama of one layer, whatever the policy is; `to_hf` has both old and new rope keys."""
    out = config.policy.to_hf(dtype) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,  # the head is the drafter's own
        "bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "draft_vocab_size": config.draft_vocab_size,
    }
    eagle: dict[str, Any] = {"use_aux_hidden_state": True}
    if kind == "vllm":
        out["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in config.layers]
    elif kind == "sglang":
        eagle["eagle_aux_hidden_state_layer_ids"] = list(config.layers)
    return out | {"eagle_config": eagle}


def load_eagle3(
    directory: str | Path, about: Mapping[str, Any]
) -> tuple[Eagle3Config, dict[str, Tensor], Origin]:
    """A drafter directory (format hf) whose config.json is `about`. Raises CheckpointError or ConfigError."""
    file = Path(directory) / "drafter.safetensors"
    layers, size = about.get("eagle3_layers"), about.get("draft_vocab_size")
    if not isinstance(layers, list) or not all(isinstance(i, int) for i in layers):
        raise CheckpointError(
            f"{file.parent / 'config.json'}: eagle3_layers = {layers!r} must be a list of three ids"
        )
    if not isinstance(size, int):
        raise CheckpointError(
            f"{file.parent / 'config.json'}: draft_vocab_size = {size!r} must be an integer"
        )
    config = Eagle3Config.of(ModelConfig.from_hf(about), tuple(layers), size)
    try:
        weights = load_file(str(file))
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{file} cannot be read: {e}") from e
    check_eagle3_tensors(weights, config)
    return config, weights, Origin(int(about.get("policy_version", 0)), int(about.get("trained_steps", 0)))
