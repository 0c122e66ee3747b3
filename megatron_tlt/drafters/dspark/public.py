"""Block drafters as others publish them, so that a run can begin with one.

| made with | config.json | names |
|---|---|---|
| DeepSpec | `Qwen3DSparkModel`, `Qwen3DFlashModel`; keys at the top | as ours, with copies of the policy's tables |
| z-lab | `DFlashDraftModel`, `DFlash2DraftModel`; `dflash_config` | as ours, without a Markov head |
| speculators | `speculators_model_type` dspark, dflash or dflash2, `transformer_layer_config` | as ours |

Embedding and LM head are the policy's; a file's own copies must be equal to them (`published`). A confidence head is
not read, with a warning: match rates measured at each slot decide how many drafted tokens are verified. Alignments and
numberings stand in `block_drafters`. Forms that compute something else (causal blocks, other Markov heads, scaled
logits, convolutions and selectors of other sizes than all published ones) are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_tlt.config.block_drafters import CONV_GROUP, NUM_CANDIDATES, block_shape, is_block_drafter
from megatron_tlt.drafters.dspark.config import BlockConfig
from megatron_tlt.drafters.published import (
    PublicForm,
    draft_vocabulary,
    layer_entries,
    section,
    stored_tensors,
    unknown_entries,
)
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.hf.config import ModelConfig

_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_CONFIDENCE = "confidence_head."
# Entries that change what is computed, with the values that are computed here.
_COMPUTED: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("is_causal", "causal", "use_swa", "attention_sink_bias", "attention_bias", "mlp_bias"), (False,)
)
_COMPUTED |= {"swa_window_size": (), "output_multiplier": (1,), "logit_scale": (1,), "final_logit_softcapping": (0,)}
_COMPUTED |= {"input_embedding_scale": (1,), "conv_kernel_size": (2,), "conv_group_size": (CONV_GROUP,)}
_COMPUTED |= {"selector_top_k": (NUM_CANDIDATES,), "markov_head_type": ("vanilla",)}
_COMPUTED |= {"projector_type": ("dflash", "dflash2", "dspark"), "attention_mode": ("gqa", "mha")}
_READ = {"block_size", "markov_rank", "mask_token_id", "sample_from_anchor", "shift_label", "selector_rank"}
_READ |= {"target_layer_ids", "aux_hidden_state_layer_ids", "dflash_config", "layer_types", "sliding_window"}
_READ |= {"sliding_window_non_causal", "use_sliding_window", "max_window_layers", "dspark_bonus_anchor"}
# About the policy, training, and the confidence head.
_READ |= {"num_target_layers", "num_anchors", "max_anchors"}
_READ |= {"enable_confidence_head", "use_confidence_head", "confidence_head_with_markov", "confidence_head_alpha"}


def public_config(about: Mapping[str, Any], policy: ModelConfig, layers: tuple[int, ...] | None = None) -> BlockConfig:
    """The drafter of config.json `about`; `layers` where it names none. Raises CheckpointError or ConfigError."""
    nested = section(about, "dflash_config")
    given = {**section(about, "transformer_layer_config"), **about, **nested}
    unknown_entries(nested, {*_COMPUTED, *_READ}, "dflash_config")
    own = layer_entries(about, given, _COMPUTED, _READ)
    kinds = {str(kind) for kind in given.get("layer_types") or ()}
    if others := kinds - {"full_attention", "sliding_attention"}:
        raise CheckpointError(f"a block drafter with {', '.join(sorted(others))} layers is not computed here")
    # `max_window_layers` says nothing: published files with a window in every layer have it at their number of layers.
    if not kinds and given.get("use_sliding_window") and given.get("sliding_window") is not None:
        raise CheckpointError("use_sliding_window = True, but layer_types, which says in which layers, is missing")
    # Slots of sliding layers see later ones in speculators' files by default, in others where the file says so.
    is_open = given.get("sliding_window_non_causal", "speculators_model_type" in about)
    if "sliding_attention" in kinds and not is_open and given.get("is_causal") is None and given.get("causal") is None:
        raise CheckpointError("a block drafter with sliding windows and no is_causal: false is causal inside a block")
    widths = {own.get("hidden_size"), about.get("target_hidden_size") or own.get("hidden_size")}
    if widths != {policy.hidden_size}:
        raise CheckpointError(f"its hidden size is {sorted(map(str, widths))}, the policy's {policy.hidden_size}")
    try:
        shape = block_shape(about)
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"an entry of a block drafter is missing or wrong: {e}") from e
    if not shape.aux_layers and layers is None:
        raise CheckpointError("names no target_layer_ids: rollout.speculation.layers says which layers it reads")
    family = _family(about)
    own |= {"architectures": [_ARCHITECTURES[family]], "model_type": family, "tie_word_embeddings": False}
    own |= {"vocab_size": policy.vocab_size, "num_hidden_layers": shape.layers}
    shape = replace(shape, aux_layers=shape.aux_layers or layers or ())
    return BlockConfig.of(policy, shape, draft_vocabulary(about, policy), ModelConfig.from_hf(own))


def _family(about: Mapping[str, Any]) -> str:
    """The family of its layers, Qwen3's where only the drafter has a name. Raises CheckpointError for another one."""
    name = str((about.get("transformer_layer_config") or about).get("model_type") or "qwen3")
    if name in _ARCHITECTURES:
        return name
    if any(part in name.lower() for part in ("dflash", "dspark", "speculator")):
        return "qwen3"
    raise CheckpointError(f"model_type = {name!r}: layers of {', '.join(_ARCHITECTURES)} only are computed here")


def public_warnings(
    directory: Path, about: Mapping[str, Any], policy: ModelConfig, layers: tuple[int, ...] | None
) -> list[str]:
    """What the file has and is not read."""
    if not any(name.startswith(_CONFIDENCE) for name in stored_tensors(directory)):
        return []
    return ["its confidence head is not read: match rates measured at each slot decide how many tokens are verified"]


FORM = PublicForm(is_block_drafter, public_config, public_warnings, not_read=(_CONFIDENCE,))
