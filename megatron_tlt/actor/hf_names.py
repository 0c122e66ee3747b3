"""Which Hugging Face tensors make which megatron parameter, and how TP cuts it.

Legend: E experts, H hidden, V vocabulary, n query heads, g key/value heads, d head width, F MLP width, tp TP size.

Pure functions on tensors and names: no process group, no megatron. Experts are stacked (`models/hf/experts.py`).
One `Slot` is one megatron parameter:

    kind          Hugging Face tensors            cut over TP
    replicated    one                             not at all
    vocab         one [V, H]                      rows, V padded with zero rows to a multiple of tp
    columns       one [H, in]                     columns (row-parallel linear: o_proj, down_proj)
    qkv           q, k, v [heads * d(, H)]        by key/value group: its query heads, its key, its value
    rows          gate, up [F, H]                 rows of each, gate part above up part
    experts       a stack [E, ...]                not over TP: by expert, over EP

The factors of adapters (`lora.py`) are slots of their own, one tensor each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_tlt.config.actor import LoraSection
from megatron_tlt.models.hf.config import ModelConfig

Kind = Literal["replicated", "vocab", "columns", "qkv", "rows", "experts"]


@dataclass(frozen=True)
class Slot:
    """One megatron parameter of one pipeline stage.

    `paths` are its possible names inside the stage's model (local spec, Transformer Engine spec), `layer` its layer's
    number in the whole model. `exported` is False for a second copy of a tensor that another stage owns (tied
    embeddings).
    """

    hf_names: tuple[str, ...]
    paths: tuple[str, ...]
    stage: int
    kind: Kind
    layer: int | None = None
    exported: bool = True

    @property
    def stacked_keys(self) -> tuple[str, ...]:
        """`paths` without the layer's number: keys of tensors that hold a parameter of all layers."""
        return self._below("decoder.layers")

    @property
    def global_paths(self) -> tuple[str, ...]:
        """`paths` with the layer's number in the whole model."""
        return self._below(f"decoder.layers.{self.layer}")

    def _below(self, prefix: str) -> tuple[str, ...]:
        """`paths` with `prefix` in place of their layer; as they are outside layers."""
        if self.layer is None:
            return self.paths
        return tuple(f"{prefix}.{path.split('.', 3)[3]}" for path in self.paths)


def slots(config: ModelConfig, pp: int) -> list[Slot]:
    """Every parameter of the model over `pp` equal stages, in the order of a Hugging Face checkpoint."""
    per_stage = config.num_layers // pp
    word = "embedding.word_embeddings.weight"
    found = [Slot(("model.embed_tokens.weight",), (word,), 0, "vocab")]
    for layer in range(config.num_layers):
        found.extend(_layer_slots(config, layer, stage=layer // per_stage, local=layer % per_stage))
    last = pp - 1
    found.append(Slot(("model.norm.weight",), ("decoder.final_layernorm.weight",), last, "replicated"))
    if not config.tie_word_embeddings:
        found.append(Slot(("lm_head.weight",), ("output_layer.weight",), last, "vocab"))
    elif pp > 1:
        found.append(Slot(("model.embed_tokens.weight",), ("output_layer.weight",), last, "vocab", exported=False))
    return found


def _layer_slots(config: ModelConfig, layer: int, stage: int, local: int) -> Iterator[Slot]:
    hf, mg = f"model.layers.{layer}.", f"decoder.layers.{local}."

    def slot(names: tuple[str, ...], paths: tuple[str, ...], kind: Kind) -> Slot:
        return Slot(tuple(hf + name for name in names), tuple(mg + path for path in paths), stage, kind, layer)

    def qkv(what: str) -> Slot:
        names = tuple(f"self_attn.{x}_proj.{what}" for x in "qkv")
        return slot(names, (f"self_attention.linear_qkv.{what}",), "qkv")

    norm_1 = ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    has_experts = layer in config.moe_layers
    norm_2 = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    yield slot(("input_layernorm.weight",), norm_1, "replicated")
    yield qkv("weight")
    if config.qkv_bias:
        yield qkv("bias")
    if config.qk_norm:
        yield slot(("self_attn.q_norm.weight",), ("self_attention.q_layernorm.weight",), "replicated")
        yield slot(("self_attn.k_norm.weight",), ("self_attention.k_layernorm.weight",), "replicated")
    yield slot(("self_attn.o_proj.weight",), ("self_attention.linear_proj.weight",), "columns")
    yield slot(("post_attention_layernorm.weight",), norm_2[:1] if has_experts else norm_2, "replicated")
    if has_experts:
        stored = "mlp.experts.experts.linear_{}.weight"  # in checkpoints, megatron's name
        yield slot(("mlp.gate.weight",), ("mlp.router.weight",), "replicated")
        yield slot(("mlp.experts.gate_up_proj",), ("mlp.experts.fc1", stored.format("fc1")), "experts")
        yield slot(("mlp.experts.down_proj",), ("mlp.experts.fc2", stored.format("fc2")), "experts")
    for theirs, ours in _dense_parts(config, has_experts):
        both = (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")
        yield slot(both, (f"{ours}.linear_fc1.weight",), "rows")
        yield slot((f"{theirs}.down_proj.weight",), (f"{ours}.linear_fc2.weight",), "columns")
    if has_experts and config.shared_expert_intermediate_size:
        yield slot(("mlp.shared_expert_gate.weight",), ("mlp.shared_experts.gate_weight",), "replicated")


def _dense_parts(config: ModelConfig, has_experts: bool) -> list[tuple[str, str]]:
    """Hugging Face's and megatron's name of the layer's MLP, or of its shared expert, if it has one."""
    if not has_experts:
        return [("mlp", "mlp")]
    return [("mlp.shared_expert", "mlp.shared_experts")] if config.shared_expert_intermediate_size else []


# The kinds of B and A for a weight of each kind.
_FACTOR_KINDS: dict[Kind, tuple[Kind, Kind]] = {
    "qkv": ("rows", "replicated"),
    "rows": ("rows", "replicated"),
    "columns": ("replicated", "columns"),
    "experts": ("experts", "experts"),
}


def adapter_slots(config: ModelConfig, lora: LoraSection, pp: int) -> dict[Slot, tuple[int, ...]]:
    """The factors of every adapter over `pp` equal stages, in the order of the model, and their full shapes.

    Factors of experts are stacks [E, ...] under names like `model.layers.0.mlp.experts.gate_proj.lora_A.weight`.
    """
    shapes, found = config.parameter_shapes(), {}
    for slot in slots(config, pp):
        if slot.kind not in _FACTOR_KINDS:
            continue
        module, kinds = slot.paths[0].rpartition(".")[0], _FACTOR_KINDS[slot.kind]
        for matrix, (*lead, rows, inputs) in _matrices(slot, shapes):
            target = matrix.rpartition(".")[2]
            sides = (
                ("lora_A", kinds[1], (*lead, lora.rank, inputs)),
                ("lora_B", kinds[0], (*lead, rows, lora.rank)),
            )
            for factor, kind, shape in sides if target in lora.targets else ():
                names, paths = (f"{matrix}.{factor}.weight",), (f"{module}.{target}.{factor}",)
                found[replace(slot, hf_names=names, paths=paths, kind=kind)] = shape
    return found


def _matrices(slot: Slot, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The matrices in a parameter, without `.weight`, and their shapes; a stack of experts' gate and up apart."""
    for name in slot.hf_names:
        stem = name.removesuffix(".weight")
        if stem.endswith(".gate_up_proj"):
            experts, rows, inputs = shapes[name]
            for part in ("gate_proj", "up_proj"):
                yield stem.replace("gate_up_proj", part), (experts, rows // 2, inputs)
        elif not name.endswith(".bias"):
            yield stem, shapes[name]


def expert_fields(config: ModelConfig) -> dict[str, Any]:
    """A model's experts for megatron, in TransformerConfig and in a checkpoint's arguments, which name only
    their number differently.
    """
    shared = config.shared_expert_intermediate_size
    pattern = [int(layer in config.moe_layers) for layer in range(config.num_layers)]
    return {
        # By a list megatron stores the tensors of each layer apart: for layers with and without experts, which have no
        # common tensor.
        "moe_layer_freq": pattern if config.has_mixed_layers else 1,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        # softmax over the chosen logits = softmax over all, chosen, divided by their sum
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_shared_expert_gate": bool(shared),
    }


def shard(config: ModelConfig, slot: Slot, full: list[Tensor], rank: int, tp: int) -> Tensor:
    """Rank `rank`'s part of a parameter, from the full Hugging Face tensors in the slot's order.

    Of experts, `rank` and `tp` are those of expert parallel.
    """
    if slot.kind == "replicated":
        return full[0]
    if slot.kind == "vocab":
        rows = -(-full[0].shape[0] // tp)
        part = full[0][rank * rows : (rank + 1) * rows]
        missing = rows - part.shape[0]
        return torch.cat([part, part.new_zeros(missing, part.shape[1])]) if missing else part
    if slot.kind == "columns":
        return full[0].chunk(tp, 1)[rank]
    if slot.kind == "experts":
        return full[0].chunk(tp, 0)[rank]
    if slot.kind == "rows":
        return torch.cat([x.chunk(tp, 0)[rank] for x in full])
    # A TP rank holds whole key/value groups: [groups, (query heads + 2) * d, ...]
    by_group = [x.reshape(config.num_kv_heads, -1, *x.shape[1:]).chunk(tp, 0)[rank] for x in full]
    return torch.cat(by_group, 1).flatten(0, 1)


def unshard(config: ModelConfig, slot: Slot, parts: list[Tensor]) -> list[Tensor]:
    """The full Hugging Face tensors, in the slot's order, from every TP (EP) rank's part (may be views of it)."""
    if slot.kind == "replicated":
        return [parts[0]]
    if slot.kind == "vocab":
        return [_join(parts, 0)[: config.vocab_size]]
    if slot.kind == "columns":
        return [_join(parts, 1)]
    if slot.kind == "experts":
        return [_join(parts, 0)]
    if slot.kind == "rows":
        count = len(slot.hf_names)
        split_rows = [part.chunk(count, 0) for part in parts]
        return [_join([rows[i] for rows in split_rows], 0) for i in range(count)]
    d, groups = config.head_dim, config.num_kv_heads // len(parts)
    sizes = [config.num_heads // config.num_kv_heads * d, d, d]
    split = [part.reshape(groups, -1, *part.shape[1:]).split(sizes, 1) for part in parts]
    return [_join([heads[i] for heads in split], 0).flatten(0, 1) for i in range(3)]


def _join(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
