"""Mixture-of-experts models: their fields of config.json, and their tensors' names on disk.

Inside the program the experts of a layer are two stacked tensors, whatever the family:

    model.layers.L.mlp.gate.weight               [E, H]       the router
    model.layers.L.mlp.experts.gate_up_proj      [E, 2F, H]   each expert's gate rows above its up rows
    model.layers.L.mlp.experts.down_proj         [E, H, F]
    model.layers.L.mlp.shared_expert.{gate,up,down}_proj.weight, .mlp.shared_expert_gate.weight [1, H]    (Qwen2-MoE)

On disk every expert has its own three tensors; a stack has their rows, expert by expert.
No torch here.

Legend: E experts, H hidden, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_tlt.errors import ConfigProblem

MOE_FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral")
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def is_stack(name: str) -> bool:
    """Whether a tensor holds all experts of a layer."""
    return name.endswith((_GATE_UP, _DOWN))


def moe_layer_shapes(hidden: int, experts: int, width: int, shared_width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that replace the dense MLP of a layer; names without the `model.layers.{i}.` prefix."""
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (experts, hidden),
        _GATE_UP: (experts, 2 * width, hidden),
        _DOWN: (experts, hidden, width),
    }
    if shared_width:
        shapes |= {
            "mlp.shared_expert.gate_proj.weight": (shared_width, hidden),
            "mlp.shared_expert.up_proj.weight": (shared_width, hidden),
            "mlp.shared_expert.down_proj.weight": (hidden, shared_width),
            "mlp.shared_expert_gate.weight": (1, hidden),
        }
    return shapes


def route_type(num_experts: int) -> str:
    """Type name of recorded expert ids."""
    return "uint8" if num_experts <= 256 else "int16"


def route_width(config: Any) -> int:
    """Experts that a row chooses over all layers of a `ModelConfig`: layers with experts * k."""
    return len(config.moe_layers) * int(config.num_experts_per_tok)


def names_on_disk(family: str, name: str, num_experts: int) -> tuple[str, ...]:
    """The stored tensors whose rows, one after the other, are the tensor `name`."""
    if family not in MOE_FAMILIES or ".mlp." not in name:
        return (name,)
    is_mixtral = family == "mixtral"
    stem = name.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else name
    if not is_stack(name):
        return (stem,)
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    parts = (gate, up) if name.endswith(_GATE_UP) else (down,)
    before = stem.rpartition(".")[0]
    return tuple(f"{before}.{expert}.{part}.weight" for expert in range(num_experts) for part in parts)


def moe_fields(hf: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The fields of `ModelConfig` that describe experts; none for a dense family."""
    if family not in MOE_FAMILIES:
        return {}
    is_mixtral = family == "mixtral"
    # transformers reads neither field for Mixtral.
    dense, step = ((), 1) if is_mixtral else (hf.get("mlp_only_layers") or (), hf.get("decoder_sparse_step") or 1)
    layers = range(hf["num_hidden_layers"])
    return {
        "num_experts": _num_experts(hf),
        "num_experts_per_tok": hf["num_experts_per_tok"],
        "moe_intermediate_size": hf["intermediate_size" if is_mixtral else "moe_intermediate_size"],
        "shared_expert_intermediate_size": hf["shared_expert_intermediate_size"] if family == "qwen2_moe" else 0,
        "norm_topk_prob": _renormalises(hf, family),
        "moe_layers": tuple(i for i in layers if i not in dense and (i + 1) % step == 0),
    }


def moe_to_hf(fields: Mapping[str, Any], family: str, num_layers: int) -> dict[str, Any]:
    """`moe_fields` in the form of config.json."""
    if family == "mixtral":
        return {
            "num_local_experts": fields["num_experts"],
            "num_experts_per_tok": fields["num_experts_per_tok"],
        }
    named = {name: value for name, value in fields.items() if name != "moe_layers"}
    if family != "qwen2_moe":
        del named["shared_expert_intermediate_size"]
    dense = [i for i in range(num_layers) if i not in fields["moe_layers"]]
    return {**named, "decoder_sparse_step": 1, "mlp_only_layers": dense}


def moe_problems(hf: Mapping[str, Any], family: str) -> Iterator[ConfigProblem]:
    """Experts in a dense family, missing and impossible fields, and unsupported variants."""
    counts = {key: hf.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")}
    if family not in MOE_FAMILIES:
        for key, value in counts.items():
            if value:
                yield ConfigProblem(key, value, f"mixture of experts: only in {', '.join(MOE_FAMILIES)}")
        return
    sizes = {"num_experts": _num_experts(hf), "num_experts_per_tok": hf.get("num_experts_per_tok")}
    if family != "mixtral":
        sizes["moe_intermediate_size"] = hf.get("moe_intermediate_size")
    if family == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = hf.get("shared_expert_intermediate_size")
    wrong = {name for name, value in sizes.items() if type(value) is not int or value < 1}
    for name, value in sizes.items():
        if name in wrong:
            yield ConfigProblem(name, value, "must be a positive integer")
    experts, chosen = sizes["num_experts"], sizes["num_experts_per_tok"]
    if not wrong & {"num_experts", "num_experts_per_tok"} and chosen > experts:
        yield ConfigProblem("num_experts_per_tok", chosen, f"must be at most num_experts ({experts})")
    if chosen == 1 and _renormalises(hf, family):
        allowed = "must be at least 2 where gates are renormalised (norm_topk_prob): a single one is 1 for any router"
        yield ConfigProblem("num_experts_per_tok", chosen, allowed)
    yield from _layer_problems(hf)


def _layer_problems(hf: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    step, dense = hf.get("decoder_sparse_step"), hf.get("mlp_only_layers") or []
    if step is not None and (type(step) is not int or step < 1):
        yield ConfigProblem("decoder_sparse_step", step, "must be a positive integer")
    if not isinstance(dense, (list, tuple)) or any(type(i) is not int for i in dense):
        yield ConfigProblem("mlp_only_layers", dense, "must be a list of layer numbers")


def _renormalises(hf: Mapping[str, Any], family: str) -> bool:
    """Whether the gates of the chosen experts are divided by their sum."""
    return family == "mixtral" or bool(hf.get("norm_topk_prob", False))


def _num_experts(hf: Mapping[str, Any]) -> Any:
    """transformers 5 writes num_local_experts where older files have num_experts."""
    return hf.get("num_experts") or hf.get("num_local_experts")
