"""Fields of a config.json: types of those that are read, and what becomes of all others.

A field that is read must have its type: nothing is coerced. Of the others

- those that never change a forward pass (`_HARMLESS`), and those that say "off", are skipped in silence;
- those whose name is about the forward pass (`_OF_THE_FORWARD`: a multiplier, a norm, a kind of attention) are
  refused, known ones and those of families to come: their weights were made for another computation;
- the rest are warned of by name (`unread_fields`).

No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_tlt.errors import ConfigProblem
from megatron_tlt.models.hf.rope import ROPE_OBJECTS

_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob", "qkv_bias",
          "use_qk_norm")  # fmt: skip
_COUNTS = ("sliding_window", "max_window_layers", "bos_token_id", "pad_token_id")
_MAY_BE_NULL = ("use_qk_norm", "sliding_window", "bos_token_id", "pad_token_id", *ROPE_OBJECTS, "layer_types")
# The others that `ModelConfig` reads; it checks their values itself.
_READ_ELSEWHERE = """
    architectures model_type vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size
    num_key_value_heads head_dim max_position_embeddings original_max_position_embeddings rms_norm_eps rope_theta
    hidden_act eos_token_id quantization_config partial_rotary_factor layer_types num_experts num_local_experts
    n_routed_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size decoder_sparse_step
    mlp_only_layers
"""
READ = frozenset((*_FLAGS, *_COUNTS, *ROPE_OBJECTS, *_READ_ELSEWHERE.split()))
# Origin and storage of the file; training and kernels; settings of generation, and of heads for classification.
_HARMLESS_NAMES = """
    _name_or_path _model_name_or_path _commit_hash name_or_path transformers_version torch_dtype dtype use_bfloat16
    torchscript use_cache transformers.js_config unsloth_version unsloth_fixed model_name is_llama_config
    tokenizer_class model_max_length max_sequence_length seq_length pretraining_tp tf_legacy_loss attention_backend
    _attn_implementation _attn_implementation_internal _attn_implementation_autoset attn_implementation
    use_flash_attn use_flash_attention use_flash_attention_2 _flash_attn_2_enabled attention_softmax_in_fp32
    initializer_range initializer_std init_std neftune_noise_alpha gradient_checkpointing chunk_size_feed_forward
    router_aux_loss_coef router_jitter_noise output_router_logits output_attentions output_hidden_states return_dict
    return_dict_in_generate is_decoder tie_encoder_decoder cross_attention_hidden_size
    id2label label2id num_labels problem_type finetuning_task task_specific_params prefix sep_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids
    do_sample temperature top_k top_p typical_p min_length max_length num_beams num_beam_groups diversity_penalty
    early_stopping length_penalty repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size output_scores
    exponential_decay_length_penalty num_return_sequences remove_invalid_values max_new_tokens
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
_HARMLESS_ENDS = ("dropout", "pdrop", "dropout_prob", "dropout_rate")
_OF_THE_FORWARD = re.compile(
    "attn|attention|rope|rotary|nope|alibi|position_embedding|norm|bias|scal|multiplier|softcap|soft_cap|clip|capping"
    "|window|swa|sink|residual|router|routing|expert|moe|causal|bidirectional|activation|quant|compress|vision|audio"
    "|text_config|per_layer|block_configs|pruned|sparse|encoder|dim_model_base|altup|(^|_)(mla|ssm|mamba)"
)
# Of Qwen2.5-1M: vLLM computes it, transformers does not. Warned of, and refused beside vLLM.
DUAL_CHUNK = "dual_chunk_attention_config"
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope", "rotary"),
    "scoring_func": ("softmax",),
    "norm_type": ("rmsnorm", "rms_norm"),
    "is_causal": (True,),
}
_OFF_AT_ONE = re.compile("scal|multiplier|factor|_pct")


def known_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that describe a decoder: of a drafter's config.json, whose other fields are its kind's."""
    return {name: value for name, value in hf.items() if name in READ}


def type_problems(hf: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Fields of the wrong type. `ModelConfig` checks sizes, epsilon and end tokens itself."""
    for names, is_right, allowed in (
        (_FLAGS, lambda value: isinstance(value, bool), "must be true or false"),
        (_COUNTS, lambda value: type(value) is int, "must be an integer"),
        (ROPE_OBJECTS, lambda value: isinstance(value, Mapping), "must be an object"),
        (("layer_types",), _is_list_of_text, "must be a list of names"),
    ):
        for name in names:
            is_null = hf.get(name) is None and (name not in hf or name in _MAY_BE_NULL)
            if not is_null and not is_right(hf[name]):
                yield ConfigProblem(name, hf[name], allowed + (" or null" if name in _MAY_BE_NULL else ""))


def forward_problems(hf: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Fields of a forward pass that is not ours."""
    for name in _unread(hf):
        if _OF_THE_FORWARD.search(name) and name != DUAL_CHUNK:
            allowed = "is not computed here; it may be removed only where the model does without it"
            yield ConfigProblem(name, hf[name], allowed)


def unread_fields(hf: Mapping[str, Any]) -> list[str]:
    """Fields that are set, of which it is not known whether they change anything."""
    refused = {problem.path for problem in forward_problems(hf)}
    return [name for name in _unread(hf) if name not in refused]


def _unread(hf: Mapping[str, Any]) -> list[str]:
    return [name for name in sorted(hf) if _is_unread(name, hf[name])]


def _is_unread(name: str, value: Any) -> bool:
    """Whether a field is set to something and neither read nor known to be harmless."""
    if name in READ or name in _HARMLESS or name.endswith(_HARMLESS_ENDS):
        return False
    if name in _NEUTRAL:
        return value is not None and value not in _NEUTRAL[name]
    is_one = type(value) in (int, float) and value == 1 and _OFF_AT_ONE.search(name) is not None
    return bool(value) and not is_one


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
