"""Megatron-LM's arguments of a model in a checkpoint's common.pt: written, and compared with config.json."""

from __future__ import annotations

import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.actor.hf_names import expert_fields
from megatron_tlt.models.hf.config import ModelConfig

COMMON = "common.pt"
# Arguments of the model that names and shapes of tensors leave open.
_COMPARED = (
    "num_attention_heads", "num_query_groups", "kv_channels", "add_bias_linear", "swiglu", "position_embedding_type",
    "rotary_base", "use_rope_scaling", "rope_scaling_factor", "normalization", "norm_epsilon",
    "moe_router_topk", "moe_router_pre_softmax",
)  # fmt: skip
# Arguments of computations that no model here has, with their values where these are off.
_OFF = {
    "apply_layernorm_1p": False,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "rotary_seq_len_interpolation_factor": 1,
    "no_rope_freq": None,
    "window_size": None,
    "softmax_type": "vanilla",
    "qk_l2_norm": False,
    "apply_residual_connection_post_layernorm": False,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "moe_router_group_topk": None,
    "moe_router_topk_limited_devices": None,
    "moe_apply_probs_on_input": False,
}
# Of Llama 3's frequency scaling Megatron-LM has an argument for the factor alone; the other numbers are in its code.
_FIXED_SCALING = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


class _Unread:
    """In place of an instance of a class that is not known; keeps nothing of it."""

    def __init__(self, *_: Any):
        """Takes whatever the class takes."""

    def __setstate__(self, _: Any) -> None:
        """Takes whatever the class takes."""


def read_arguments(directory: Path) -> dict[str, Any] | None:
    """The arguments in a checkpoint's common.pt; None if there are none or they cannot be read. Runs no code of it."""
    file = directory / COMMON
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)  # not what megatron has registered
        classes: list[Any] = [(Namespace if name == "argparse.Namespace" else _Unread, name) for name in unknown]
        with torch.serialization.safe_globals(classes):  # its end removes them
            return vars(torch.load(file, map_location="cpu", weights_only=True)["args"])
    except (OSError, EOFError, ValueError, LookupError, AttributeError, TypeError, RuntimeError,
            pickle.UnpicklingError):  # fmt: skip
        return None


def argument_problems(found: dict[str, Any], config: ModelConfig) -> list[str]:
    """Arguments of a checkpoint (`read_arguments`) under which its tensors are not the model of `config`."""
    wanted = {name: value for name, value in megatron_arguments(config).items() if name in _COMPARED} | _OFF
    found = dict(found)
    if not found.get("group_query_attention", True):
        found["num_query_groups"] = found.get("num_attention_heads")
    if not found.get("use_rope_scaling"):
        found.pop("rope_scaling_factor", None)
    both = [(name, found.get(name), value) for name, value in wanted.items()]
    problems = [f"{name} is {own!r}, not {value!r}" for name, own, value in both if own not in (None, value)]
    if found.get("use_rope_scaling"):
        problems += [f"{name} is {fixed} in Megatron-LM, not {own:g}" for name, own, fixed in _other_scaling(config)]
    if "sinkhorn" in str(found.get("moe_router_load_balancing_type")):  # or a list of types
        problems.append("moe_router_load_balancing_type is 'sinkhorn', whose gates are others")
    if (found.get("vocab_size") or 0) > config.vocab_size:
        problems.append(f"vocab_size is {found['vocab_size']}, above {config.vocab_size}: rows of tokens would be lost")
    return problems


def _other_scaling(config: ModelConfig) -> list[tuple[str, float, int]]:
    """Name, value and Megatron-LM's value of the model's numbers that it computes with others of."""
    scaling = config.rope_scaling
    both = [] if scaling is None else [(name, getattr(scaling, name), fixed) for name, fixed in _FIXED_SCALING.items()]
    return [(name, own, fixed) for name, own, fixed in both if own != fixed]


def megatron_arguments(config: ModelConfig) -> dict[str, Any]:
    """Megatron-LM's arguments for this model, under the names that it has in common.pt; its defaults are left out."""
    scaling, theta = config.rope_scaling, config.rope_theta
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "group_query_attention": config.num_kv_heads != config.num_heads,
        "num_query_groups": config.num_kv_heads,
        "kv_channels": config.head_dim,
        "seq_length": config.max_position_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": int(theta) if theta == int(theta) else theta,  # it computes with either
        "use_rope_scaling": scaling is not None,
        **({} if scaling is None else {"rope_scaling_factor": scaling.factor}),
        "add_bias_linear": False,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_norm,
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm_epsilon": config.rms_norm_eps,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "padded_vocab_size": config.vocab_size,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "ckpt_format": "torch_dist",
        **({"num_experts": config.num_experts, **expert_fields(config)} if config.num_experts else {}),
    }


def flags_to_give(config: ModelConfig) -> list[str]:
    """The flags of this model that `--use-checkpoint-args` of Megatron-LM does not take from common.pt."""
    flags, scaling = [f"--norm-epsilon {config.rms_norm_eps}"], config.rope_scaling
    flags += ["--qk-layernorm"] if config.qk_norm else []
    flags += ["--moe-shared-expert-gate"] if config.shared_expert_intermediate_size else []
    if scaling is not None:
        flags.append(f"--use-rope-scaling --rope-scaling-factor {scaling.factor}")
    return flags


def without_a_flag(config: ModelConfig) -> list[str]:
    """A line for each number of the model that Megatron-LM has neither an argument nor a flag for."""
    return [
        f"{name} is {own:g}, for which Megatron-LM has no flag: it computes with {fixed}, and so another model"
        for name, own, fixed in _other_scaling(config)
    ]
