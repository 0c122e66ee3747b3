"""EAGLE-3 drafters as others publish them, so that a run can begin with one.

| made with | config.json | file | names |
|---|---|---|---|
| EAGLE's own code | `LlamaForCausalLMEagle3` | pytorch_model.bin | as ours |
| SpecForge, ModelOpt | the same | model.safetensors | as ours, or `layers.0.` for `midlayer.` |
| speculators | `speculators_model_type`, `transformer_layer_config` | model.safetensors | `layers.0.` |

The policy's embedding is used; a file's own copy must be equal to it (`published`). Layer ids in `eagle_config` mean a
layer's output (SpecForge, SGLang), those at the top level the number of layers before (vLLM, speculators); without ids
they are the engines' default (`Eagle3Config.of`), with a warning. Forms with other norms (EAGLE-3.1), biases, more
layers or a hidden size that is not the policy's are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_tlt.config.block_drafters import flag, layer_ids
from megatron_tlt.drafters.eagle.config import Eagle3Config, default_layers
from megatron_tlt.drafters.published import (
    COPIES,
    PublicForm,
    draft_vocabulary,
    layer_entries,
    section,
    unknown_entries,
)
from megatron_tlt.errors import CheckpointError, ConfigError
from megatron_tlt.models.hf.config import ModelConfig

_IDS = "eagle_aux_hidden_state_layer_ids"
_NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
# Entries that change what is computed, with the values that are computed here.
_COMPUTED: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("fc_norm", "use_aux_norm", "norm_before_fc", "norm_output", "bias", "attention_bias", "mlp_bias"), (False,)
)
_COMPUTED |= {"use_aux_hidden_state": (True,), "use_input_layernorm_in_first_layer": (True,)}
_COMPUTED |= {"use_last_layernorm": (True,), "use_mtp_layernorm": (False,), "eagle_decoder_type": ("llama",)}
_COMPUTED |= {"next_layer_regular": (True,)}
_COMPUTED |= {"parallel_draft_step": (0, 1), "parallel_draft_heads_num_layers": (0, 1), "num_hidden_layers": (1,)}
_READ = {_IDS, "eagle_config", "norm_before_residual"}
# Entries of `eagle_config` about training (ModelOpt).
_TRAINING = {"eagle_num_layers", "eagle_hidden_state_distillation", "eagle_disable_moe", "eagle_offline", "has_lm_head"}
_TRAINING |= {"eagle_freeze_base_model", "eagle_loss_decay_factor", "eagle_report_acc", "eagle_self_logit_distillation"}


def is_public(about: Mapping[str, Any]) -> bool:
    """Whether config.json is that of an EAGLE-3 drafter that others made."""
    named = any("Eagle3" in str(name) for name in about.get("architectures") or ())
    return "drafter" not in about and (named or about.get("speculators_model_type") == "eagle3")


def public_config(about: Mapping[str, Any], policy: ModelConfig, layers: tuple[int, ...] | None = None) -> Eagle3Config:
    """The drafter of config.json `about`; `layers` where it names none. Raises CheckpointError or ConfigError."""
    eagle = section(about, "eagle_config")
    given = {**eagle, **about, **section(about, "transformer_layer_config")}
    if other := [name for name in about.get("architectures") or () if name not in _NAMES]:
        raise CheckpointError(f"architectures = {other!r}: of EAGLE-3 drafters only {', '.join(_NAMES)} are read")
    unknown_entries(eagle, {*_COMPUTED, *_READ, *_TRAINING}, "eagle_config")
    own = layer_entries(about, given, _COMPUTED, _READ)
    own |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    own |= {"vocab_size": policy.vocab_size, "eos_token_id": None, "quantization_config": None}
    layer = replace(ModelConfig.from_hf(own), tie_word_embeddings=False)
    widths = {layer.hidden_size, about.get("target_hidden_size") or layer.hidden_size}
    if widths != {policy.hidden_size}:
        raise CheckpointError(f"its hidden size is {sorted(widths)}, the policy's {policy.hidden_size}")
    found = _layers(about)
    try:
        is_normed = flag(given, ("norm_before_residual",), "speculators_model_type" in about)
        return Eagle3Config.of(policy, found or layers, draft_vocabulary(about, policy), layer, is_normed)
    except ConfigError as error:
        if not found:
            raise
        raise CheckpointError(f"{_IDS}: {error.problems[0].allowed}, found outputs {list(found)}") from error
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def public_warnings(
    directory: Path, about: Mapping[str, Any], policy: ModelConfig, layers: tuple[int, ...] | None
) -> list[str]:
    """What config.json does not say and is guessed, as engines do."""
    found = []
    if not _layers(about) and layers is None:
        guess = f"the outputs of layers {list(default_layers(policy.num_layers))}, the engines' default, are a guess"
        found.append(f"has no {_IDS}: {guess}; rollout.speculation.layers says others")
    if "speculators_model_type" in about and about.get("norm_before_residual") is None:
        found.append("has no norm_before_residual: true, vLLM's default, is a guess (speculators' is false)")
    return found


def _layers(about: Mapping[str, Any]) -> tuple[int, ...]:
    """The policy layers whose outputs are read; () where none are named. Raises CheckpointError."""
    try:
        inner = layer_ids(section(about, "eagle_config"), _IDS)
        outer = tuple(i - 1 for i in layer_ids(about, _IDS))
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if inner and outer and inner != outer:
        numbers = f"{list(inner)} in eagle_config are outputs, those at the top level outputs of {list(outer)}"
        raise CheckpointError(f"{_IDS} names different layers: {numbers}")
    return inner or outer


# An EAGLE-3 drafter's LM head is its own.
_COPIED = frozenset(COPIES) - {"lm_head.weight"}
FORM = PublicForm(is_public, public_config, public_warnings, _COPIED, layer="midlayer.")
