"""Export of a drafter of kind eagle3, which every engine can serve: one set of tensors, and each engine's config keys.

A layer id i of ours means the OUTPUT of policy layer i, from 0. SGLang's ids mean the same (it adds 1 itself), vLLM's
count the layers before (i + 1), and TensorRT-LLM takes ours as an argument and not from a file.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_tlt.drafter.checkpoint import SavedDrafter, cast_tensors
from megatron_tlt.drafter.export.files import ExportFiles, Format
from megatron_tlt.models.eagle.eagle3 import Eagle3Config


def eagle3_engine_files(drafter: SavedDrafter, engine: Format, dtype: torch.dtype) -> ExportFiles:
    """The files that `engine` reads."""
    shape = drafter.shape
    assert isinstance(shape, Eagle3Config)
    json = {"config.json": _engine_config(shape, engine, str(dtype).removeprefix("torch."))}
    if engine == "trtllm":
        json["speculative.json"] = {"eagle3_layers_to_capture": list(shape.layers)}
    return ExportFiles({"model.safetensors": cast_tensors(drafter.weights, dtype)}, json)


def _engine_config(config: Eagle3Config, engine: Format, dtype: str) -> dict[str, Any]:
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
    if engine == "vllm":
        out["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in config.layers]
    elif engine == "sglang":
        eagle["eagle_aux_hidden_state_layer_ids"] = list(config.layers)
    return out | {"eagle_config": eagle}
