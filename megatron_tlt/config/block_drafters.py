"""Block drafters (DSpark, DFlash, DFlash 2): their sizes, by default and in config.json files of all forms. Torch-free.

| form | layers that are read | alignment |
|---|---|---|
| ours, DeepSpec (`target_layer_ids`) | outputs of layers, from 0 | slot k gives the token behind it, not of DFlash |
| z-lab's DFlash (`dflash_config.target_layer_ids`) | the same | slot k gives its own token, slot 0 none |
| speculators (`aux_hidden_state_layer_ids`) | one more | slot k its own token, but with `sample_from_anchor` |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

BLOCK_SIZE = 8  # tokens of a block of a new drafter
BLOCK_LAYERS = 2  # its layers: on compute-bound machines each costs as many rows as a block has
BLOCK_TAPS = 3  # policy layers that it reads
CONV_GROUP = 16  # channels that share a dynamic kernel of DFlash 2, as in all published drafters
NUM_CANDIDATES = 16  # tokens that DFlash 2's selector chooses from, as in all published drafters
LOGITS_AT_ONCE = 1 << 26  # of drafts, or one position's: 256 MiB in float32, or 50 drafts over 152k tokens
_MOST_RANK = 256  # of the Markov head, as in all published drafters


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Sizes of a block drafter as its config.json has them."""

    layers: int
    aux_layers: tuple[int, ...]  # policy layers, from 0, whose outputs are read; () where the file names none
    block_size: int  # slots of a block
    markov_rank: int  # 0: no Markov head
    mask_token_id: int
    sample_from_anchor: bool  # slot k gives the token behind slot k; else slot k gives its own, and slot 0 none
    selector_rank: int = 0  # of DFlash 2's candidate selector, which comes with convolutions; 0: neither
    windows: tuple[int, ...] = ()  # of each layer, positions that a slot attends to; 0: all; (): all in every layer


def markov_rank(hidden_size: int) -> int:
    """The rank of a new drafter's Markov head."""
    return min(_MOST_RANK, hidden_size // 4)


def is_block_drafter(about: Mapping[str, Any]) -> bool:
    """Whether config.json is that of a block drafter, DFlash 2 included, that others made."""
    names = [str(name) for name in about.get("architectures") or ()]
    is_named = any("DFlash" in name or "DSpark" in name for name in names)
    is_named |= about.get("speculators_model_type") in ("dflash", "dspark", "dflash2")
    return "drafter" not in about and is_named


def layer_ids(entries: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The ids under `key`; () where there are none: absent, null, []. Raises ValueError for anything but integers."""
    value = entries.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise ValueError(f"{key} = {value!r} must be a list of integers")
    return tuple(value)


def _whole(entries: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Raises KeyError where it is missing and has no default, ValueError for anything but an integer."""
    value = entries[key] if default is None else entries.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int:
        raise ValueError(f"{key} = {value!r} must be an integer")
    return value


def flag(entries: Mapping[str, Any], keys: tuple[str, ...], default: bool) -> bool:
    """The value of a switch under any of its names. Raises ValueError for other values and for two that differ."""
    found = {key: entries[key] for key in keys if entries.get(key) is not None}
    if other := [f"{key} = {value!r}" for key, value in found.items() if not isinstance(value, bool)]:
        raise ValueError(f"{', '.join(other)} must be true or false")
    if len(set(found.values())) > 1:
        raise ValueError(f"{' and '.join(found)} differ")
    return next(iter(found.values()), default)


def block_shape(about: Mapping[str, Any]) -> BlockShape:
    """The sizes in config.json of any form. Raises KeyError, TypeError or ValueError for entries that are no form's."""
    own = about.get("layer") or about.get("transformer_layer_config") or about
    nested = about.get("dflash_config") or {}
    given = {**about, **nested}
    outputs = layer_ids(given, "target_layer_ids")
    numbers = tuple(i - 1 for i in layer_ids(given, "aux_hidden_state_layer_ids"))
    if outputs and numbers and outputs != numbers:
        raise ValueError(f"target_layer_ids = {list(outputs)}, aux_hidden_state_layer_ids name {list(numbers)}")
    kinds = own.get("layer_types") or ()
    windows = tuple(_whole(own, "sliding_window") if kind == "sliding_attention" else 0 for kind in kinds)
    # Only DeepSpec's, SpecForge's and our own files draft from the anchor's slot without an entry that says so.
    is_dspark = any("DSpark" in str(name) for name in about.get("architectures") or ())
    is_dspark |= given.get("projector_type") == "dspark"
    from_anchor = is_dspark and "speculators_model_type" not in about and not about.get("dspark_bonus_anchor")
    return BlockShape(
        _whole(own, "num_hidden_layers"),
        outputs or numbers,
        _whole(given, "block_size"),
        _whole(given, "markov_rank", 0),
        _whole(given, "mask_token_id"),
        flag(given, ("sample_from_anchor", "shift_label"), from_anchor),  # the second is TensorRT-LLM's word
        _whole(given, "selector_rank", 0),
        windows if any(windows) else (),
    )


def block_shape_in(directory: str) -> BlockShape | None:
    """The sizes of the drafter in `directory`; None where it has no such config.json, which loading it refuses."""
    try:
        return _read_shape(directory)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@lru_cache(maxsize=8)
def _read_shape(directory: str) -> BlockShape:
    return block_shape(json.loads((Path(directory) / "config.json").read_text(encoding="utf-8")))
