"""Reading and writing Hugging Face configurations."""

from __future__ import annotations

import json

import pytest

from megatron_tlt.config.load import build_config
from megatron_tlt.errors import CheckpointError, ConfigError
from megatron_tlt.models.hf.config import ModelConfig, RopeScaling
from megatron_tlt.models.hf.fields import unread_fields

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": 7,
    "bos_token_id": 3,
    "use_sliding_window": False,
    "sliding_window": 128,
    "max_window_layers": 2,
}
QWEN3_MOE = {
    **QWEN2,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_old_and_new_spelling_read_the_same() -> None:
    old = {**QWEN2, **LLAMA, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**LLAMA3_ROPE, "rope_theta": 5e5}
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)
    assert ModelConfig.from_hf(new).rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    assert ModelConfig.from_hf(new).rope_theta == 5e5


def test_a_mixtral_has_the_theta_of_either_form() -> None:
    mixtral = {**QWEN3_MOE, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
    del mixtral["rope_theta"]
    assert ModelConfig.from_hf(mixtral).rope_theta == 1e6
    assert ModelConfig.from_hf({**mixtral, "rope_parameters": {"rope_theta": 1e4}}).rope_theta == 1e4


def test_a_mixtral_has_experts_in_every_layer() -> None:
    mixtral = {**QWEN3_MOE, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
    fields = {"mlp_only_layers": [0], "decoder_sparse_step": 2}  # of other families: transformers does not read them
    assert ModelConfig.from_hf({**mixtral, **fields}).moe_layers == (0, 1)


@pytest.mark.parametrize("outside", [{}, {"original_max_position_embeddings": 4096}, {"rope_theta": 3e5}])
def test_of_rope_in_several_places_the_same_counts_as_in_transformers(outside: dict) -> None:
    from transformers import LlamaConfig

    inner = {key: value for key, value in LLAMA3_ROPE.items() if key not in outside}
    second = {"rope_type": "llama3", "rope_theta": outside.get("rope_theta", 5e5)}
    about = {key: value for key, value in {**QWEN2, **LLAMA}.items() if key != "rope_theta"}
    about |= {"rope_scaling": inner, "rope_parameters": second, **outside}
    ours, theirs = ModelConfig.from_hf(about), LlamaConfig(**about)
    theirs.standardize_rope_params()  # as its rotary embedding does
    assert ours.rope_scaling is not None
    found = ours.rope_theta, ours.rope_scaling.original_max_position_embeddings
    assert found == tuple(theirs.rope_parameters[key] for key in ("rope_theta", "original_max_position_embeddings"))


def test_families_differ_where_they_should() -> None:
    qwen2 = ModelConfig.from_hf(QWEN2)
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim, qwen2.eos_token_ids) == (True, False, 16, (7,))
    qwen3 = ModelConfig.from_hf(
        {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "eos_token_id": [7, 8]}
    )
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim, qwen3.eos_token_ids) == (False, True, 32, (7, 8))


@pytest.mark.parametrize(
    ("change", "field", "word"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures", "Qwen2ForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "model_type", "mamba"),
        ({"num_experts": 8}, "num_experts", "only in qwen2_moe"),
        ({**QWEN3_MOE, "num_experts": None}, "num_experts", "positive integer"),
        ({**QWEN3_MOE, "num_experts_per_tok": 9}, "num_experts_per_tok", "at most num_experts (8)"),
        (
            {**QWEN3_MOE, "num_experts_per_tok": 1, "norm_topk_prob": True},
            "num_experts_per_tok",
            "at least 2 where gates are renormalised",
        ),
        ({**QWEN3_MOE, "moe_intermediate_size": 0}, "moe_intermediate_size", "positive integer"),
        ({**QWEN3_MOE, "mlp_only_layers": ["0"]}, "mlp_only_layers", "layer numbers"),
        ({**QWEN3_MOE, "attention_bias": True}, "attention_bias", "false for qwen3_moe"),
        (
            {**QWEN3_MOE, "architectures": None, "model_type": "qwen2_moe"},
            "shared_expert_intermediate_size",
            "positive",
        ),
        ({"use_sliding_window": True, "max_window_layers": 1}, "sliding_window", "full attention only"),
        (
            {**QWEN3_MOE, "use_sliding_window": True, "layer_types": ["full_attention"] * 2},
            "sliding_window",
            "full attention only",
        ),
        (
            {**QWEN3_MOE, "architectures": None, "model_type": "mixtral", "layer_types": ["full_attention"] * 2},
            "sliding_window",
            "full attention only",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window", "128"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type", "'llama3'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.rope_type", "linear"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "rope_parameters.low_freq_factor", "required"),
        ({"num_hidden_layers": None}, "num_hidden_layers", "positive integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "divide"),
        ({"head_dim": 15}, "head_dim", "even"),
        ({"hidden_act": "gelu"}, "hidden_act", "silu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "fp32"),
        ({"model_type": "llama"}, "model_type", "must be 'qwen2' with architectures Qwen2ForCausalLM"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps", "above 0"),
        ({"rope_theta": -5}, "rope_theta", "-5: must be a number above 0"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta", "above 0"),
        ({"rope_scaling": {**LLAMA3_ROPE, "factor": -8}}, "rope_scaling.factor", "above 0"),
        ({"eos_token_id": 100}, "eos_token_id", "must be below vocab_size (100)"),
        ({"eos_token_id": [7, -1]}, "eos_token_id", "not negative"),
        ({"eos_token_id": "</s>"}, "eos_token_id", "token id"),
        ({"max_position_embeddings": -1}, "max_position_embeddings", "positive"),
        ({"max_position_embeddings": None}, "max_position_embeddings", "positive"),
        ({"max_position_embeddings": "512"}, "max_position_embeddings", "'512': must be a positive integer"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers", "2.0: must be a positive integer"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps", "'1e-6': must be a number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings", "'false': must be true or false"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings", "true or false"),
        ({"sliding_window": "128"}, "sliding_window", "integer or null"),
        ({"architectures": "Qwen2ForCausalLM"}, "architectures", "list of names"),
        ({"layer_types": "full_attention"}, "layer_types", "list of names"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types", "only full_attention"),
        ({**LLAMA, "use_sliding_window": True, "max_window_layers": 0}, "sliding_window", "full attention only"),
        ({"rope_scaling": "linear"}, "rope_scaling", "must be an object"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor", "'default' scales nothing"),
        ({"rope_parameters": {"full_attention": {"factor": 2}}}, "rope_parameters.full_attention", "not computed"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters.rope_theta", "what rope_theta says (1000000.0)"),
        (
            {"rope_scaling": LLAMA3_ROPE, "original_max_position_embeddings": 4096},
            "rope_scaling.original_max_position_embeddings",
            "what original_max_position_embeddings says (4096)",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "must be 1.0"),
        ({"attention_multiplier": 0.5}, "attention_multiplier", "not computed"),
        ({"logits_scaling": 8}, "logits_scaling", "not computed"),
        ({**QWEN3_MOE, "use_qk_norm": False}, "use_qk_norm", "must be true for qwen3_moe"),
        ({"qkv_bias": False}, "qkv_bias", "must be true for qwen2"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers", "not computed"),
        ({"is_causal": False}, "is_causal", "not computed"),
        ({"compression_config": {"format": "int"}}, "compression_config", "not computed"),
        ({"per_layer_config": {"0": {"hidden_size": 8}}}, "per_layer_config", "not computed"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(change: dict, field: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf({**QWEN2, **change})
    assert any(p.path == field for p in caught.value.problems)
    assert word in str(caught.value)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf({**QWEN2, "hidden_act": "gelu", "num_experts": 4, "vocab_size": 0})
    assert len(caught.value.problems) == 3


# Fields beside the shape in published config.json files of the families.
PUBLISHED = {
    "Llama 3.1": {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "pretraining_tp": 1}
    | {"rope_scaling": LLAMA3_ROPE, "torch_dtype": "bfloat16", "transformers_version": "4.43.0", "use_cache": True},
    "SmolLM2": {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "initializer_range": 0.04}
    | {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}, "_name_or_path": "x", "head_dim": None},
    "a derivative": {"unsloth_fixed": True, "model_name": "a/b", "_model_name_or_path": "a/b", "max_new_tokens": 20}
    | {"_attn_implementation_autoset": True, "pad_token_id": 99, "max_length": 20}
    | {"attn_implementation": "flash_attention_2", "id2label": {"0": "a"}, "do_sample": True, "dtype": "bfloat16"},
}


@pytest.mark.parametrize("fields", PUBLISHED.values(), ids=PUBLISHED)
def test_published_fields_pass_in_silence(fields: dict) -> None:
    shape = {key: value for key, value in QWEN2.items() if "window" not in key}
    ModelConfig.from_hf(about := {**shape, **LLAMA, **fields})
    assert not unread_fields(about)


@pytest.mark.parametrize("fields", [{}, {"use_mrope": False}, {"layer_types": ["full_attention"] * 2}])
def test_published_fields_of_qwen_pass_in_silence(fields: dict) -> None:
    for family in (QWEN2, QWEN3_MOE):
        about = {**family, "router_aux_loss_coef": 0.001, "output_router_logits": False, **fields}
        ModelConfig.from_hf(about)
        assert not unread_fields(about)


def test_published_fields_of_qwen3_coder_pass_in_silence() -> None:
    coder = {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0, "rope_scaling": None}
    assert ModelConfig.from_hf(about := {**QWEN3_MOE, **coder}).qk_norm
    assert not unread_fields(about)


def test_unknown_fields_are_named_where_they_are_set() -> None:
    about = {**QWEN2, "dual_chunk_attention_config": {"chunk_size": 8}, "auto_map": {"AutoModel": "x.Y"}, "new": 0}
    ModelConfig.from_hf(about)
    assert unread_fields(about) == ["auto_map", "dual_chunk_attention_config"]


def test_missing_and_broken_files(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="JSON object"):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_round_trip_through_a_file(family: str, tmp_path) -> None:
    kind = {"architectures": None, "model_type": family}
    config = ModelConfig.from_hf({**QWEN2, **kind, "rope_scaling": LLAMA3_ROPE})
    assert config.family == family
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(tmp_path) == config
    assert ModelConfig.from_hf(tmp_path / "config.json") == config


@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts"])
def test_experts_and_the_layers_that_have_them(spelling: str) -> None:
    hf = {**QWEN3_MOE, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    del hf["num_experts"]
    config = ModelConfig.from_hf({**hf, spelling: 8})
    assert (config.num_experts, config.num_experts_per_tok, config.moe_layers) == (8, 2, (3,))
    shapes = config.parameter_shapes()
    assert shapes["model.layers.3.mlp.experts.gate_up_proj"] == (8, 64, 64)
    assert shapes["model.layers.3.mlp.experts.down_proj"] == (8, 64, 32)
    assert shapes["model.layers.1.mlp.gate_proj.weight"] == (96, 64)
    assert ModelConfig.from_hf(config.to_hf()) == config
    qwen3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 5}
    dense = ModelConfig.from_hf({**QWEN2, **qwen3, "head_dim": 16})
    assert config.dense_sibling.parameter_shapes() == dense.parameter_shapes()


def test_parameters_are_counted_once() -> None:
    tied, untied = (ModelConfig.from_hf({**QWEN2, "tie_word_embeddings": t}) for t in (True, False))
    assert untied.num_parameters - tied.num_parameters == 100 * 64
    assert "lm_head.weight" not in tied.parameter_shapes()
    assert tied.parameter_shapes()["model.layers.1.self_attn.k_proj.bias"] == (32,)


def test_a_run_in_the_place_of_a_model_is_named() -> None:
    run = build_config({"model": {"path": "m"}}).model_dump(mode="json")
    with pytest.raises(ConfigError, match="model_type = None: is the configuration of a run: `megatron-tlt export"):
        ModelConfig.from_hf(run)
