"""Model directories for conversion tests, and Megatron's tensors made the naive way, loop by loop, from the model."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from tests.helpers.tiny_models import hf_model

FAMILIES = ("qwen2", "qwen3", "llama", "uneven", "qwen3_moe", "qwen3_moe_mixed", "qwen2_moe", "mixtral")


_UNEVEN = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


def make_model(family: str, directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Writes a tiny random model; "uneven" has 12 query heads over 4 groups, biases, no tying, vocabulary 101."""
    model = hf_model("qwen2", **_UNEVEN) if family == "uneven" else hf_model(family)
    model.to(dtype).save_pretrained(directory, **options)
    return model


def naive_megatron(model: Any, padded_vocab: int) -> dict[str, Tensor]:
    """megatron-core's global tensors of a Hugging Face model, with the layers stacked; written from megatron's layout.
    Layers with and without experts are not stacked.

    linear_qkv: for each key/value group its query heads, its key head, its value head. linear_fc1: gate above up.
    """
    state = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    config = model.config
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads

    def padded(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, torch.full((padded_vocab - len(tensor), tensor.shape[1]), 7.0).to(tensor)])

    out = {
        "embedding.word_embeddings.weight": padded(state["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": state["model.norm.weight"],
    }
    if "lm_head.weight" in state:
        out["output_layer.weight"] = padded(state["lm_head.weight"])
    renamed = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.experts.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
        "mlp.experts.experts.linear_fc2.weight": "mlp.experts.down_proj",
        "mlp.shared_experts.linear_fc2.weight": "mlp.shared_expert.down_proj.weight",
        "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    }
    layers: dict[str, dict[int, Tensor]] = {}
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        for key, name in renamed.items():
            if at + name in state:
                moved = name.startswith("post_attention") and f"{at}mlp.gate.weight" in state
                layers.setdefault("pre_mlp_layernorm.weight" if moved else key, {})[i] = state[at + name]
        for theirs, ours in (("mlp", "mlp"), ("mlp.shared_expert", "mlp.shared_experts")):
            if f"{at}{theirs}.gate_proj.weight" in state:
                gate_up = [state[f"{at}{theirs}.{half}_proj.weight"] for half in ("gate", "up")]
                layers.setdefault(f"{ours}.linear_fc1.weight", {})[i] = torch.cat(gate_up)
        for what in ("weight", "bias"):
            if f"{at}self_attn.q_proj.{what}" in state:
                q, k, v = (state[f"{at}self_attn.{x}_proj.{what}"] for x in "qkv")
                joined = _by_group(q, k, v, heads // groups, width)
                layers.setdefault(f"self_attention.linear_qkv.{what}", {})[i] = joined
    if any(len(held) < config.num_hidden_layers for held in layers.values()):
        return out | {f"decoder.layers.{i}.{key}": t for key, held in layers.items() for i, t in held.items()}
    return out | {f"decoder.layers.{key}": torch.stack(list(held.values())) for key, held in layers.items()}


def _by_group(q: Tensor, k: Tensor, v: Tensor, heads: int, width: int) -> Tensor:
    rows = []
    for group in range(len(k) // width):
        for head in range(group * heads, (group + 1) * heads):
            rows.append(q[head * width : (head + 1) * width])
        rows += [t[group * width : (group + 1) * width] for t in (k, v)]
    return torch.cat(rows)


def save_foreign(
    directory: Path, tensors: dict[str, Tensor], iteration: int | None = None, arguments: dict[str, Any] | None = None
) -> None:
    """A torch_dist checkpoint written by torch alone: Megatron-LM's layout with `iteration`, else the bare shards; with
    `arguments` in its common.pt, else without one.
    """
    inner = directory if iteration is None else directory / f"iter_{iteration:07d}"
    inner.mkdir(parents=True)
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(inner), no_dist=True)
    (inner / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    if arguments is not None:
        torch.save({"args": Namespace(**arguments), "iteration": iteration}, inner / "common.pt")
    if iteration is not None:
        (directory / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def logits(model: Any) -> Tensor:
    """Of a fixed prompt, fp32."""
    with torch.no_grad():
        return model(torch.arange(1, 25)[None] % model.config.vocab_size).logits
