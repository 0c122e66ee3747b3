"""What published drafters of all kinds have in common: entries of config.json, and copies of the policy's tables.

A drafter here reads the policy's own embedding, LM head and final norm. Published files have copies of them, which were
frozen in training or not: a copy that differs belongs to another policy, or to a drafter that is not computed here.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.drafters.model import DrafterConfig
from megatron_tlt.errors import CheckpointError, shortened
from megatron_tlt.models.hf.config import EMBED, HEAD, ModelConfig
from megatron_tlt.models.hf.fields import forward_problems, known_fields
from megatron_tlt.models.hf.files import weight_files
from megatron_tlt.models.hf.loader import open_tensors

NORM = "model.norm.weight"
COPIES = {  # names in published files, without `model.` -> the policy's tensor
    "embed_tokens.weight": EMBED,
    "lm_head.weight": HEAD,
    "verifier_lm_head.weight": HEAD,
    "verifier_norm.weight": NORM,
}
_MAPS = ("d2t", "t2d")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_RTOL, _ATOL = 2.0**-7, 1e-6  # files round tables to bf16 (8 bits) or fp16 (smallest step 6e-8)
_ROWS = 8192  # of a table, compared at a time
# What `torch.load` raises for a file that is empty, cut off or altered: its unpickler checks nothing itself.
_DAMAGED = (
    *(OSError, RuntimeError, EOFError, ValueError, TypeError, LookupError, AssertionError),
    *(struct.error, pickle.UnpicklingError),
)

# Entries about a file and its training, which change nothing that a drafter computes.
_ABOUT = {"architectures", "auto_map", "model_type", "speculators_model_type", "speculators_config"}
_ABOUT |= {"speculators_version", "transformer_layer_config", "tie_word_embeddings", "has_no_defaults_at_init"}
_ABOUT |= {"draft_vocab_size", "target_hidden_size", "vocab_size", "embed_requires_grad", "has_lm_head"}
_ABOUT |= {"quantization_config", "bos_token_id", "eos_token_id", "pad_token_id"}


@dataclass(frozen=True, slots=True)
class PublicForm:
    """Directories of a kind as others publish them."""

    is_one: Callable[[Mapping[str, Any]], bool]  # by the contents of config.json
    # Of config.json, for a policy; with the layers that the configuration names, where the file has none.
    config: Callable[[Mapping[str, Any], ModelConfig, tuple[int, ...] | None], DrafterConfig]
    # What is guessed or not read, for a policy and the layers that the configuration names.
    warnings: Callable[[Path, Mapping[str, Any], ModelConfig, tuple[int, ...] | None], list[str]]
    copied: frozenset[str] = frozenset(COPIES)  # names of a file's copies of the policy's tables
    not_read: tuple[str, ...] = ()  # beginnings of names
    layer: str = "layers.0."  # our name of what others call so

    def read(self, directory: Path, config: DrafterConfig) -> dict[str, Tensor]:
        """All tensors under our names, floating ones in fp32. Raises CheckpointError for a file that cannot be read."""
        if (directory / "mask_embedding.pt").exists():
            raise CheckpointError(f"{directory} has a mask outside the policy's embedding, which is not computed here")
        given = {
            name.replace("layers.0.", self.layer, 1): read()
            for name, read in stored_tensors(directory).items()
            if not (name in self.copied or name.startswith(self.not_read) or name.endswith("rotary_emb.inv_freq"))
        }
        return named_weights(given, config.reduced, config.policy.vocab_size)

    def copies(self, directory: Path) -> dict[str, Tensor]:
        """The file's own copies of the policy's tables."""
        return {name: read() for name, read in stored_tensors(directory).items() if name in self.copied}


def stored_tensors(directory: Path) -> dict[str, Callable[[], Tensor]]:
    """A function that reads it for each tensor, by its name without `model.`. Raises CheckpointError."""
    file = directory / "pytorch_model.bin"
    if file.is_file() and not any(directory.glob("*.safetensors")):
        given = _read_pickle(file)
        return {name.removeprefix("model."): partial(given.__getitem__, name) for name in given}

    def read(name: str, file: Path) -> Tensor:
        with open_tensors(file) as tensors:
            return tensors.get_tensor(name)  # type: ignore[no-any-return]

    return {name.removeprefix("model."): partial(read, name, file) for name, file in weight_files(directory).items()}


def _read_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors in a file of `torch.save`, by name. Raises CheckpointError for a damaged file and other contents."""
    try:
        given = torch.load(file, map_location="cpu", weights_only=True)
    except _DAMAGED as e:
        raise CheckpointError(f"{file} cannot be read: {e or type(e).__name__}") from e
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{file} holds a {type(given).__name__}, not tensors by name")
    if other := [str(name) for name, value in given.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(f"{file} holds more than tensors by name (a training checkpoint?): {shortened(other)}")
    return dict(given)


def layer_entries(
    about: Mapping[str, Any], given: Mapping[str, Any], computed: Mapping[str, Collection[Any]], read: Collection[str]
) -> dict[str, Any]:
    """The entries of config.json `about` that describe a layer, as a model's config.json would.

    `given`: all entries, nested ones too; `computed`: those that change the computation, with the values that are
    computed here beside null; `read`: the others of the kind. Raises CheckpointError for another value, and for an
    entry of a forward pass that is not known here, by name.
    """
    other = [f"{n} = {given[n]!r}" for n in computed if given.get(n) is not None and given[n] not in computed[n]]
    if other:
        raise CheckpointError(f"a drafter with {', '.join(other)} is of a form that is not computed here")
    own = {*_ABOUT, *computed, *read}
    every = {**about, **section(about, "transformer_layer_config")}
    layer = {name: value for name, value in every.items() if name not in own}
    if problems := list(forward_problems(layer)):
        raise CheckpointError("; ".join(map(str, problems)))
    return known_fields(layer)


def section(about: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The entries below `key`; none where it is absent or empty. Raises CheckpointError for anything but an object."""
    value = about.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{key} = {value!r} must be an object")
    return value


def draft_vocabulary(about: Mapping[str, Any], policy: ModelConfig) -> int:
    """The size of the drafter's vocabulary, by default the policy's. Raises CheckpointError for no integer."""
    size = about.get("draft_vocab_size") or policy.vocab_size
    if type(size) is not int:
        raise CheckpointError(f"draft_vocab_size = {size!r} must be an integer")
    return size


def unknown_entries(nested: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raises CheckpointError for entries of the section `where` that are set and not `known`."""
    other = [f"{name} = {value!r}" for name, value in nested.items() if name not in known and value]
    if other:
        raise CheckpointError(f"{where} has entries that are not known here: {', '.join(other)}")


def named_weights(given: Mapping[str, Tensor], reduced: bool, vocab_size: int) -> dict[str, Tensor]:
    """Floating tensors in fp32, and the maps d2t int64 and t2d bool of a reduced vocabulary.

    Raises CheckpointError for tensors of other types (quantized ones), and for a map of a vocabulary that is whole by
    config.json and not in the file.
    """
    out = {name: tensor for name, tensor in given.items() if name not in _MAPS}
    if other := [f"{name} is {tensor.dtype}" for name, tensor in out.items() if tensor.dtype not in _FLOATS]:
        raise CheckpointError(f"tensors must be fp32, fp16 or bf16: {shortened(other)}")
    out = {name: tensor.float() for name, tensor in out.items()}
    offsets = given.get("d2t")
    if reduced and offsets is not None:
        ids = torch.arange(len(offsets)) + offsets.long()
        known = torch.isin(torch.arange(vocab_size), ids)
        out |= {"d2t": offsets.long(), "t2d": given.get("t2d", known).bool()}
    elif offsets is not None and (len(offsets) != vocab_size or offsets.any()):
        what = f"draft_vocab_size is the policy's {vocab_size} tokens, but d2t maps {len(offsets)} tokens to others"
        raise CheckpointError(f"config.json and weights disagree: {what}")
    return out


def table_problems(copies: Mapping[str, Tensor], ids: Tensor | None, policy: ModelConfig, model: Path) -> list[str]:
    """Copies in a published file, under its names, that are not the tables of the policy in `model`.

    `ids`: the policy's ids of a reduced vocabulary, whose rows a copy of the LM head may hold alone. A model directory
    without weights is not compared.
    """
    try:
        files = weight_files(model)
    except CheckpointError:
        return []
    problems = []
    for name, copy in copies.items():
        stored = EMBED if COPIES[name] == HEAD and policy.tie_word_embeddings else COPIES[name]
        if stored in files and (problem := _difference(copy, files[stored], stored, ids)):
            problems.append(f"its {name} {problem} of {model}")
    return problems


def _difference(copy: Tensor, file: Path, stored: str, ids: Tensor | None) -> str:
    """How a copy differs from the tensor `stored` in `file`; empty where they are equal but for rounding."""
    with open_tensors(file) as tensors:
        table = tensors.get_slice(stored)
        shape = tuple(table.get_shape())
        is_part = ids is not None and tuple(copy.shape) == (len(ids), *shape[1:]) and copy.shape != shape
        if tuple(copy.shape) != shape and not is_part:
            return f"has shape {tuple(copy.shape)}, not that of {stored} {shape}"
        whole = table[:][ids] if is_part else None
        for start in range(0, len(copy), _ROWS):
            rows = slice(start, start + _ROWS)
            theirs = (table[rows] if whole is None else whole[rows]).float()
            if not torch.isclose(copy[rows].float(), theirs, rtol=_RTOL, atol=_ATOL).all():
                return f"is not the {stored}"
    return ""
