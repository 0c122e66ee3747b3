"""Shapes and constants of a model of `ARCHITECTURES`, read from and written to config.json.

No torch here: the simulator and `megatron-tlt check` read model shapes without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeGuard

from megatron_tlt.config.json_reader import read_object
from megatron_tlt.config.model import ArchitectureConfig, ModelSection
from megatron_tlt.errors import ConfigError, ConfigProblem
from megatron_tlt.models.hf.experts import (
    moe_fields,
    moe_layer_shapes,
    moe_problems,
    moe_to_hf,
    names_on_disk,
)
from megatron_tlt.models.hf.fields import forward_problems, type_problems
from megatron_tlt.models.hf.rope import (
    DEFAULT_THETA,
    LLAMA3_KEYS,
    is_positive,
    rope_of,
    rope_problems,
    rope_type,
)

Family = Literal["qwen2", "qwen3", "llama", "qwen2_moe", "qwen3_moe", "mixtral"]

ARCHITECTURES: dict[str, Family] = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
}
_DENSE: dict[Family, Family] = {"qwen2_moe": "qwen2", "qwen3_moe": "qwen3", "mixtral": "llama"}
_DEFAULT_EPS = 1e-6
_DEFAULT_WINDOW = 4096  # tokens, of Qwen
_DEFAULT_POSITIONS = {"qwen2": 32768, "qwen3": 32768, "llama": 2048}  # of MoE families: their dense sibling's
_MIXTRAL_DEFAULTS = {  # where transformers' differ from the other families'
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
}
_MIXTRAL_THETA = 1e6
_REQUIRED_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
MOE_FIELDS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "moe_layers",
)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # their Hugging Face names


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency scaling (Llama 3.1 model card; Hugging Face `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of a decoder. Build it with `from_hf`.

    `num_experts` 0: dense. `intermediate_size` is the width of dense layers, `moe_layers` the numbers of those with
    experts; the other fields of experts are Hugging Face's. `shared_expert_intermediate_size` 0: none.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = _DEFAULT_EPS
    rope_theta: float = DEFAULT_THETA
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = False
    moe_layers: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> ModelConfig:
        """Reads a model directory, a config.json or its dictionary; old and transformers-5 spellings.

        Raises CheckpointError if the file is missing or not JSON, ConfigError (all problems at once, with the file's
        name) if the model is none of `ARCHITECTURES` that is computed exactly, or contradicts itself.
        """
        if isinstance(source, Mapping):
            return _parse(source)
        path = Path(source)
        file = path if path.suffix == ".json" else path / "config.json"
        try:
            return _parse(read_object(file))
        except ConfigError as error:
            named = [replace(problem, path=f"{file}: {problem.path}") for problem in error.problems]
            raise ConfigError(named) from error

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """The config.json that `transformers` loads; `dtype` is that of the weights beside it."""
        architecture = next(a for a, family in ARCHITECTURES.items() if family == self.family)
        scaling = None
        if self.rope_scaling is not None:
            scaling = {"rope_type": "llama3"} | {key: getattr(self.rope_scaling, key) for key in LLAMA3_KEYS}
        eos = list(self.eos_token_ids)
        out = {
            "architectures": [architecture],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": self.rope_theta},
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
            "pad_token_id": self.pad_token_id,
            "torch_dtype": dtype,
            "use_cache": True,
        }
        if not self.qkv_bias:
            out["attention_bias"] = False
        if self.num_experts:
            experts = {name: getattr(self, name) for name in MOE_FIELDS}
            out |= moe_to_hf(experts, self.family, self.num_layers)
        return out

    @property
    def architecture(self) -> ArchitectureConfig:
        """The shape in the form that checks and memory plan read."""
        same = {name: getattr(self, name) for name in ArchitectureConfig.model_fields if name != "dense_layers"}
        dense = [layer for layer in range(self.num_layers) if layer not in self.moe_layers]
        return ArchitectureConfig(**same, dense_layers=tuple(dense) if self.num_experts else ())

    @property
    def has_mixed_layers(self) -> bool:
        """Whether some layers have experts and some a dense MLP."""
        return 0 < len(self.moe_layers) < self.num_layers

    @property
    def dense_sibling(self) -> ModelConfig:
        """The same model with a dense MLP in every layer, from which a drafter's layer is made."""
        dense = {field.name: field.default for field in fields(self) if field.name in MOE_FIELDS}
        return replace(self, family=_DENSE.get(self.family, self.family), **dense)  # type: ignore[arg-type]

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a layer's tensors; names without the `model.layers.{i}.` prefix. Experts are stacked."""
        h, d, q, kv = self.hidden_size, self.head_dim, self.num_heads, self.num_kv_heads
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (h,),
            "self_attn.q_proj.weight": (q * d, h),
            "self_attn.k_proj.weight": (kv * d, h),
            "self_attn.v_proj.weight": (kv * d, h),
            "self_attn.o_proj.weight": (h, q * d),
            "post_attention_layernorm.weight": (h,),
        }
        if layer in self.moe_layers:
            widths = self.moe_intermediate_size, self.shared_expert_intermediate_size
            shapes |= moe_layer_shapes(h, self.num_experts, *widths)
        else:
            shapes |= {
                "mlp.gate_proj.weight": (self.intermediate_size, h),
                "mlp.up_proj.weight": (self.intermediate_size, h),
                "mlp.down_proj.weight": (h, self.intermediate_size),
            }
        if self.qkv_bias:
            for name, heads in (("q", q), ("k", kv), ("v", kv)):
                shapes[f"self_attn.{name}_proj.bias"] = (heads * d,)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (d,)
        return shapes

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor, in model order; no `lm_head.weight` when tied.

        The names are Hugging Face's, except that a layer's experts are stacked (see `experts`).
        """
        shapes: dict[str, tuple[int, ...]] = {EMBED: (self.vocab_size, self.hidden_size)}
        for i in range(self.num_layers):
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in self.layer_shapes(i).items()}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes[HEAD] = (self.vocab_size, self.hidden_size)
        return shapes

    def names_on_disk(self, name: str) -> tuple[str, ...]:
        """The tensors of a checkpoint whose rows, one after the other, are the tensor `name`: one, or one an expert."""
        return names_on_disk(self.family, name, self.num_experts)

    @property
    def num_parameters(self) -> int:
        """Stored parameters; tied embeddings count once."""
        return sum(prod(shape) for shape in self.parameter_shapes().values())


def _parse(hf: Mapping[str, Any]) -> ModelConfig:
    family = _family(hf)
    hf = {**_MIXTRAL_DEFAULTS, **hf} if family == "mixtral" else hf
    mistyped = list(type_problems(hf))
    problems = [*_contradiction(hf, family), *mistyped, *_out_of_range(hf, family), *forward_problems(hf)]
    if not mistyped:  # these compare values
        problems += [*_unsupported(hf, family), *rope_problems(hf), *moe_problems(hf, family)]
    if problems:
        raise ConfigError(problems)
    heads = int(hf["num_attention_heads"])
    rope, dense = rope_of(hf), _DENSE.get(family, family)
    default_head = 128 if family == "qwen3" else int(hf["hidden_size"]) // heads
    config = ModelConfig(
        family=family,
        vocab_size=int(hf["vocab_size"]),
        hidden_size=int(hf["hidden_size"]),
        num_layers=int(hf["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(hf.get("num_key_value_heads") or heads),
        head_dim=int(hf.get("head_dim") or default_head),
        intermediate_size=int(hf["intermediate_size"]),
        rms_norm_eps=float(hf.get("rms_norm_eps", _DEFAULT_EPS)),
        rope_theta=float(rope.get("rope_theta", _MIXTRAL_THETA if family == "mixtral" else DEFAULT_THETA)),
        rope_scaling=RopeScaling(**{k: rope[k] for k in LLAMA3_KEYS}) if rope_type(rope) == "llama3" else None,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=dense == "qwen2",
        qk_norm=dense == "qwen3",
        max_position_embeddings=int(hf.get("max_position_embeddings") or _DEFAULT_POSITIONS[dense]),
        bos_token_id=hf.get("bos_token_id"),
        eos_token_ids=_eos(hf),
        pad_token_id=hf.get("pad_token_id"),
        **moe_fields(hf, family),
    )
    if late := list(_shape_problems(config)):
        raise ConfigError(late)
    return config


def shape_of(model: ModelSection) -> ArchitectureConfig | None:
    """The shape in the model's files, or where these are not on this machine, in its section. Raises as `from_hf`."""
    is_here = (Path(model.path) / "config.json").is_file()
    return ModelConfig.from_hf(model.path).architecture if is_here else model.architecture


def _family(hf: Mapping[str, Any]) -> Family:
    names = hf.get("architectures") or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError.of("architectures", names, "must be a list of names")
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not names and hf.get("model_type") in ARCHITECTURES.values():
        return hf["model_type"]
    allowed = "only these architectures are supported:"
    if names:
        raise ConfigError.of("architectures", list(names), f"{allowed} {', '.join(ARCHITECTURES)}")
    if isinstance(hf.get("model"), Mapping) and "optimizer" in hf:
        allowed = "is the configuration of a run: `megatron-tlt export CONFIG --out DIR` writes its policy as a model"
        raise ConfigError.of("model_type", None, allowed)
    raise ConfigError.of("model_type", hf.get("model_type"), f"{allowed} {', '.join(ARCHITECTURES.values())}")


def _contradiction(hf: Mapping[str, Any], family: Family) -> Iterator[ConfigProblem]:
    """Both words for the kind of model are optional, but must mean the same."""
    if hf.get("architectures") and hf.get("model_type") not in (None, family):
        named = ", ".join(hf["architectures"])
        yield ConfigProblem("model_type", hf["model_type"], f"must be {family!r} with architectures {named}")


def _out_of_range(hf: Mapping[str, Any], family: Family) -> Iterator[ConfigProblem]:
    """Required fields that are missing, and values that no model can have."""
    nullable = ["num_key_value_heads"] if "qwen3" in family else ["num_key_value_heads", "head_dim"]
    for field in (*_REQUIRED_SIZES, *_OPTIONAL_SIZES):
        value = hf.get(field)
        is_left_out = value is None and field in _OPTIONAL_SIZES and (field not in hf or field in nullable)
        if not is_left_out and (not _is_whole(value) or value < 1):
            yield ConfigProblem(field, value, "must be a positive integer")
    if not is_positive(hf.get("rms_norm_eps", _DEFAULT_EPS)):
        yield ConfigProblem("rms_norm_eps", hf["rms_norm_eps"], "must be a number above 0")
    vocab = hf.get("vocab_size")
    ends = _eos(hf)
    if not all(map(_is_whole, ends)):
        yield ConfigProblem("eos_token_id", hf["eos_token_id"], "must be a token id, a list of them, or null")
    elif _is_whole(vocab) and vocab > 0 and any(not 0 <= end < vocab for end in ends):
        allowed = f"must be below vocab_size ({vocab}) and not negative"
        yield ConfigProblem("eos_token_id", hf["eos_token_id"], allowed)


def _eos(hf: Mapping[str, Any]) -> tuple[Any, ...]:
    value = hf.get("eos_token_id")
    return tuple(value) if isinstance(value, (list, tuple)) else (() if value is None else (value,))


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _unsupported(hf: Mapping[str, Any], family: Family) -> Iterator[ConfigProblem]:
    has_bias = not family.startswith("qwen2") and hf.get("attention_bias")
    dense = _DENSE.get(family, family)
    computed = {"qkv_bias": dense == "qwen2", "use_qk_norm": dense == "qwen3"}
    has_kinds = not {"full_attention", "sliding_attention"}.issuperset(hf.get("layer_types") or ())
    for field, is_refused, allowed in (
        ("hidden_act", hf.get("hidden_act", "silu") not in ("silu", "swish"), "must be 'silu'"),
        ("attention_bias", has_bias, f"must be false for {family}"),
        *((n, hf.get(n) not in (None, c), f"must be {str(c).lower()} for {family}") for n, c in computed.items()),
        ("mlp_bias", hf.get("mlp_bias"), "must be false"),
        ("quantization_config", hf.get("quantization_config"), "only fp32, fp16 or bf16 weights are supported"),
        ("layer_types", has_kinds, "only full_attention layers are computed"),
        ("sliding_window", _uses_window(hf, family), "sliding windows are not supported; full attention only"),
    ):
        if is_refused:
            yield ConfigProblem(field, hf.get(field), allowed)


def _uses_window(hf: Mapping[str, Any], family: Family) -> bool:
    """A window is in use when a layer has one that is shorter than the longest sequence."""
    window = hf.get("sliding_window", _DEFAULT_WINDOW if family.startswith("qwen") else None)
    positions, layers = (hf.get(name) or 0 for name in ("max_position_embeddings", "num_hidden_layers"))
    if window is None or not (_is_whole(positions) and _is_whole(layers)):  # `_out_of_range` names these
        return False
    if window >= positions > 0:
        return False
    if family == "mixtral":  # without the switch of the others
        return True
    is_on = hf.get("use_sliding_window", family == "llama")  # where transformers reads neither, and vLLM the window
    if family == "qwen3_moe":  # every layer has one
        return bool(is_on)
    if (types := hf.get("layer_types")) is not None:  # which transformers does not read in the two families above
        return any(t != "full_attention" for t in types)
    if family == "qwen2_moe":  # some layers below max_window_layers have one
        return bool(is_on)
    return bool(is_on) and hf.get("max_window_layers", 0) < layers


def _shape_problems(config: ModelConfig) -> Iterator[ConfigProblem]:
    if config.num_heads % config.num_kv_heads:
        allowed = f"must divide num_attention_heads ({config.num_heads})"
        yield ConfigProblem("num_key_value_heads", config.num_kv_heads, allowed)
    if config.head_dim % 2:
        yield ConfigProblem("head_dim", config.head_dim, "must be even (rotary embedding)")
    if config.hidden_size % 2:
        yield ConfigProblem("hidden_size", config.hidden_size, "must be even")
