"""Block drafters as others publish them, so that a run can begin with one.

| made with | config.json | names |
|---|---|---|
| DeepSpec | `Qwen3DSparkModel`, `Qwen3DFlashModel`; keys at the top | as ours, with copies of the policy's tables |
| z-lab | `DFlashDraftModel`, `dflash_config` | as ours, without a Markov head |
| speculators | `speculators_model_type` dspark or dflash, `transformer_layer_config` | as ours |

Embedding and LM head are the policy's, whatever copy the file has (all of them train with both frozen). A confidence
head is not kept: match rates measured at each slot decide how many drafted tokens are verified. `block_drafters` has
alignments and numberings. Forms that compute something else (DFlash 2, sliding windows, causal blocks, other Markov
heads, scaled logits) are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_tlt.config.block_drafters import BlockShape, block_shape, is_block_drafter
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.drafters import DrafterConfig
from megatron_tlt.models.dspark.config import BlockConfig
from megatron_tlt.models.loader import open_tensors, weight_files

if TYPE_CHECKING:
    from torch import Tensor

_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_LEFT_OUT = ("embed_tokens.", "lm_head.", "confidence_head.", "verifier_", "rotary_emb.")
# Entries of other forms, and their values that change nothing.
_OTHER_FORMS: dict[str, tuple[Any, ...]] = {
    "is_causal": (None, False),
    "causal": (None, False),
    "use_swa": (None, False),
    "attention_sink_bias": (None, False),
    "attention_bias": (None, False),
    "output_multiplier": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "conv_kernel_size": (None, 0),
    "selector_rank": (None, 0),
    "markov_head_type": (None, "vanilla"),
}

is_public = is_block_drafter


def public_config(about: Mapping[str, Any], policy: ModelConfig, layers: tuple[int, ...] | None = None) -> BlockConfig:
    """The drafter of config.json `about`; `layers` where it names none. Raises CheckpointError or ConfigError."""
    own = dict(about.get("transformer_layer_config") or about)
    given = {**own, **about, **(about.get("dflash_config") or {})}
    if refused := [name for name, harmless in _OTHER_FORMS.items() if given.get(name) not in harmless]:
        raise CheckpointError(f"a block drafter with {', '.join(refused)} is of a form that is not computed here")
    if others := {str(kind) for kind in given.get("layer_types") or ()} - {"full_attention"}:
        raise CheckpointError(f"a block drafter with {', '.join(sorted(others))} layers is not computed here")
    widths = {own.get("hidden_size"), about.get("target_hidden_size") or own.get("hidden_size")}
    if widths != {policy.hidden_size}:
        raise CheckpointError(f"its hidden size is {sorted(map(str, widths))}, the policy's {policy.hidden_size}")
    try:
        shape = block_shape(about)
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"an entry of a block drafter is missing or wrong: {e}") from e
    if not shape.aux_layers and layers is not None:
        shape = BlockShape(shape.layers, layers, *(getattr(shape, n) for n in BlockShape.__slots__[2:]))
    family = str(own.get("model_type"))
    family = family if family in _ARCHITECTURES else "qwen3"
    own |= {"architectures": [_ARCHITECTURES[family]], "model_type": family, "tie_word_embeddings": False}
    own |= {"vocab_size": policy.vocab_size, "eos_token_id": None, "quantization_config": None}
    size = about.get("draft_vocab_size") or policy.vocab_size
    return BlockConfig.of(policy, shape, int(size), ModelConfig.from_hf(own))


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
