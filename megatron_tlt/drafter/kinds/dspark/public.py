"""Block drafters as others publish them, so that a run can begin with one.

| made with | config.json | names |
|---|---|---|
| DeepSpec | `Qwen3DSparkModel`, `Qwen3DFlashModel`; keys at the top | as ours, with copies of the policy's tables |
| z-lab | `DFlashDraftModel`, `DFlash2DraftModel`; `dflash_config` | as ours, without a Markov head |
| speculators | `speculators_model_type` dspark, dflash or dflash2, `transformer_layer_config` | as ours |

Embedding and LM head are the policy's, whatever copy the file has (all of them train with both frozen). A confidence
head is not kept: match rates measured at each slot decide how many drafted tokens are verified. `block_drafters` has
alignments and numberings. Forms that compute something else (causal blocks, other Markov heads, scaled logits,
convolutions and selectors of other sizes than all published ones) are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_tlt.config.block_drafters import CONV_GROUP, NUM_CANDIDATES, block_shape, is_block_drafter
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.drafters import DrafterConfig
from megatron_tlt.models.dspark.config import BlockConfig
from megatron_tlt.models.hf_fields import known_fields
from megatron_tlt.models.hf_files import weight_files
from megatron_tlt.models.loader import open_tensors

if TYPE_CHECKING:
    from torch import Tensor

_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_LEFT_OUT = ("embed_tokens.", "lm_head.", "confidence_head.", "verifier_", "rotary_emb.")
# Entries of other forms, and their values that change nothing.
_OTHER_FORMS: dict[str, tuple[Any, ...]] = {
    "is_causal": (None, False),
    "causal": (None, False),
    "use_swa": (None, False),
    "swa_window_size": (None,),
    "attention_sink_bias": (None, False),
    "attention_bias": (None, False),
    "output_multiplier": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "input_embedding_scale": (None, 1, 1.0),
    "conv_kernel_size": (None, 2),
    "conv_group_size": (None, CONV_GROUP),
    "selector_top_k": (None, NUM_CANDIDATES),
    "markov_head_type": (None, "vanilla"),
}

is_public = is_block_drafter


def public_config(about: Mapping[str, Any], policy: ModelConfig, layers: tuple[int, ...] | None = None) -> BlockConfig:
    """The drafter of config.json `about`; `layers` where it names none. Raises CheckpointError or ConfigError."""
    own = dict(about.get("transformer_layer_config") or about)
    given = {**own, **about, **(about.get("dflash_config") or {})}
    if refused := [name for name, harmless in _OTHER_FORMS.items() if given.get(name) not in harmless]:
        raise CheckpointError(f"a block drafter with {', '.join(refused)} is of a form that is not computed here")
    kinds = {str(kind) for kind in given.get("layer_types") or ()}
    if others := kinds - {"full_attention", "sliding_attention"}:
        raise CheckpointError(f"a block drafter with {', '.join(sorted(others))} layers is not computed here")
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
    if not shape.aux_layers and layers is not None:
        shape = replace(shape, aux_layers=layers)
    family = str(own.get("model_type"))
    family = family if family in _ARCHITECTURES else "qwen3"
    own |= {"architectures": [_ARCHITECTURES[family]], "model_type": family, "tie_word_embeddings": False}
    own |= {"vocab_size": policy.vocab_size, "eos_token_id": None, "quantization_config": None, "sliding_window": None}
    size = about.get("draft_vocab_size") or policy.vocab_size
    return BlockConfig.of(policy, shape, int(size), ModelConfig.from_hf(known_fields(own)))


def read_public(directory: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """All tensors under our names, floating ones in fp32. Raises CheckpointError for a file that cannot be read."""
    if (directory / "mask_embedding.pt").exists():
        raise CheckpointError(f"{directory} has a mask outside the policy's embedding, which is not computed here")
    out: dict[str, Tensor] = {}
    for stored, file in weight_files(directory).items():
        name = stored.removeprefix("model.")
        if name.startswith(_LEFT_OUT) or "rotary_emb." in name or (name in ("d2t", "t2d") and not config.reduced):
            continue
        with open_tensors(file) as tensors:
            tensor = tensors.get_tensor(stored)
        out[name] = tensor.float() if tensor.is_floating_point() else tensor
    if config.reduced and "d2t" in out:
        out["d2t"] = out["d2t"].long()
        known = torch.isin(torch.arange(config.policy.vocab_size), torch.arange(len(out["d2t"])) + out["d2t"])
        out["t2d"] = out.get("t2d", known).bool()
    return out
