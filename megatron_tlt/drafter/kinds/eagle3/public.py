"""EAGLE-3 drafters as others publish them, so that a run can begin with one.

| made with | config.json | file | names |
|---|---|---|---|
| EAGLE's own code | `LlamaForCausalLMEagle3` | pytorch_model.bin | as ours |
| SpecForge, ModelOpt | the same | model.safetensors | as ours, or `layers.0.` for `midlayer.` |
| speculators | `speculators_model_type`, `transformer_layer_config` | model.safetensors | `layers.0.` |

The policy's embedding is used whatever copy the file has (all of them train with it frozen). Layer ids in
`eagle_config` mean a layer's output (SpecForge, SGLang), those at the top level the number of layers before (vLLM,
speculators); without ids they are the engines' default (`Eagle3Config.of`). Forms with other norms (EAGLE-3.1),
biases or a hidden size that is not the policy's are refused by name.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.drafters import DrafterConfig
from megatron_tlt.models.eagle.config import Eagle3Config
from megatron_tlt.models.hf_fields import known_fields

if TYPE_CHECKING:
    from torch import Tensor

_FILES = ("model.safetensors", "pytorch_model.bin")  # the first one that is there
_IDS = "eagle_aux_hidden_state_layer_ids"
_NOT_OURS = ("fc_norm", "use_aux_norm", "norm_before_fc", "norm_output", "bias", "attention_bias", "mlp_bias")


def is_public(about: Mapping[str, Any]) -> bool:
    """Whether config.json is that of an EAGLE-3 drafter that others made."""
    named = any("Eagle3" in name for name in about.get("architectures") or ())
    return "drafter" not in about and (named or about.get("speculators_model_type") == "eagle3")


def public_config(
    about: Mapping[str, Any], policy: ModelConfig, layers: tuple[int, ...] | None = None
) -> Eagle3Config:
    """The drafter of config.json `about`; `layers` where it names none. Raises CheckpointError or ConfigError."""
    own = dict(about.get("transformer_layer_config") or about)
    eagle = about.get("eagle_config") or {}
    given = {**eagle, **about}
    if refused := [name for name in _NOT_OURS if given.get(name) or own.get(name)]:
        raise CheckpointError(f"an EAGLE-3 drafter with {', '.join(refused)} is of a form that is not computed here")
    own |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    own |= {"vocab_size": policy.vocab_size, "eos_token_id": None, "quantization_config": None}
    layer = replace(ModelConfig.from_hf(known_fields(own)), tie_word_embeddings=False)
    widths = {layer.hidden_size, about.get("target_hidden_size") or layer.hidden_size}
    if widths != {policy.hidden_size}:
        raise CheckpointError(f"its hidden size is {sorted(widths)}, the policy's {policy.hidden_size}")
    found = layers
    if _IDS in eagle:
        found = tuple(eagle[_IDS])
    elif about.get(_IDS):
        found = tuple(i - 1 for i in about[_IDS])
    size = about.get("draft_vocab_size") or policy.vocab_size
    is_normed = bool(given.get("norm_before_residual", "speculators_model_type" in about))
    return Eagle3Config.of(policy, found, int(size), layer, is_normed)


def read_public(directory: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """All tensors under our names, floating ones in fp32. Raises CheckpointError for a file that cannot be read."""
    file = _file(directory)
    try:
        if file.suffix == ".safetensors":
            given = load_file(str(file))
        else:
            given = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, SafetensorError, pickle.UnpicklingError) as e:
        raise CheckpointError(f"{file} cannot be read: {e}") from e
    named = {_name(name): tensor for name, tensor in given.items() if not _is_left_out(name, config)}
    if config.reduced and "d2t" in named:
        named["d2t"] = named["d2t"].long()
        ids = torch.arange(len(named["d2t"])) + named["d2t"]
        known = torch.isin(torch.arange(config.policy.vocab_size), ids)
        named.setdefault("t2d", known)
        named["t2d"] = named["t2d"].bool()
    return {name: t.float() if t.is_floating_point() else t for name, t in named.items()}


def _file(directory: Path) -> Path:
    for name in _FILES:
        if (directory / name).is_file():
            return directory / name
    raise CheckpointError(f"{directory} has none of {', '.join(_FILES)}")


def _name(name: str) -> str:
    return name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)


def _is_left_out(name: str, config: DrafterConfig) -> bool:
    """The policy's embedding, rotary tables, and the map of a vocabulary that is not reduced."""
    is_map = name in ("d2t", "t2d") and not config.reduced
    return is_map or "embed_tokens" in name or name.endswith("rotary_emb.inv_freq")
