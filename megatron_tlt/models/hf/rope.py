"""Rotary embedding in a config.json: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_tlt.errors import ConfigProblem

DEFAULT_THETA = 10000.0
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE_OBJECTS = ("rope_scaling", "rope_parameters")
_KINDS = ("rope_type", "type")  # the second is the older spelling
_KEYS = (*_KINDS, "rope_theta", "partial_rotary_factor", *LLAMA3_KEYS)
_OUTSIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")  # keys beside the objects, too


def is_positive(value: Any) -> bool:
    """A number above 0; JSON's NaN and Infinity are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def rope_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """One dictionary of both forms. Of two objects it has `rope_scaling` alone, as in transformers."""
    return _outside(hf) | dict(hf.get(_object_that_counts(hf)) or {})


def _outside(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {name: hf[name] for name in _OUTSIDE if hf.get(name) is not None}


def _object_that_counts(hf: Mapping[str, Any]) -> str:
    return "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"


def rope_type(rope: Mapping[str, Any]) -> str:
    """The kind of scaling; "default": none."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def rope_problems(hf: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Kinds of rotary embedding that are not computed, missing and impossible numbers, and two words that differ."""
    yield from _contradictions(hf)
    rope, kind, where = rope_of(hf), rope_type(rope_of(hf)), _object_that_counts(hf)
    if kind not in ("default", "llama3"):
        yield ConfigProblem(f"{where}.rope_type", kind, "must be 'default' or 'llama3'")
    elif kind == "llama3":
        for key in LLAMA3_KEYS:
            if key not in rope:
                yield ConfigProblem(f"{where}.{key}", None, "is required by rope_type 'llama3'")
            elif not is_positive(rope[key]):
                yield ConfigProblem(f"{where}.{key}", rope[key], "must be a number above 0")
    elif rope.get("factor") not in (None, 1):
        yield ConfigProblem(f"{where}.factor", rope["factor"], "needs rope_type 'llama3': 'default' scales nothing")
    if not is_positive(rope.get("rope_theta", DEFAULT_THETA)):
        inside = "rope_theta" in (hf.get(where) or {})
        field = f"{where}.rope_theta" if inside else "rope_theta"
        yield ConfigProblem(field, rope["rope_theta"], "must be a number above 0")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield ConfigProblem("partial_rotary_factor", rope["partial_rotary_factor"], "must be 1.0")


def _contradictions(hf: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Keys that are not read, and a key that has two values in the forms."""
    said = {name: (name, value) for name, value in _outside(hf).items()}
    for name in ROPE_OBJECTS:
        for key, value in dict(hf.get(name) or {}).items():
            field = f"{name}.{key}"
            if key not in _KEYS and value not in (None, False):
                yield ConfigProblem(field, value, f"is not computed here; only {', '.join(_KEYS)} are")
            known, earlier = said.setdefault("rope_type" if key in _KINDS else key, (field, value))
            if earlier != value:
                yield ConfigProblem(field, value, f"must be what {known} says ({earlier!r})")
