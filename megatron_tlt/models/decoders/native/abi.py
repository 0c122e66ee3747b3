"""Structures and functions of the C library under their C names. Field order repeats `csrc/{tlt,eagle}.h`."""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np

from megatron_tlt.errors import BackendError
from megatron_tlt.models.decoders.base import MOST_AUX_LAYERS
from megatron_tlt.models.decoders.native.build import BF16, CACHE_VARIABLE, library_path

_log = logging.getLogger(__name__)

AllReduce = ctypes.CFUNCTYPE(None, c_void_p, c_int64)

REDUCE_FAILED = 7
ERRORS = {
    1: "a token id outside the vocabulary",
    2: "a position outside the rotary table (longer than model.max_context?)",
    3: "a slot outside the KV cache",
    4: "a block table that is too short or names a block outside the KV cache",
    5: "a logit row outside the batch, or not above the one before",
    6: "query_start does not cover the rows, or a shape the native decoder cannot hold",
    REDUCE_FAILED: "the tensor-parallel all-reduce failed",
    8: "no memory left",
}


def fields_of(kind: type, names: str) -> list[tuple[str, type]]:
    """Fields of one type, for `Structure._fields_`."""
    return [(name, kind) for name in names.split()]


class TltLayer(Structure):
    """`TltLayer`."""

    _fields_ = [
        *fields_of(c_void_p, "qkv o gate_up down qkv_bias input_norm post_norm q_norm k_norm"),
        *fields_of(c_void_p, "router expert_gate_up expert_down"),
        ("route", c_int64),
    ]


class TltModel(Structure):
    """`TltModel`."""

    _fields_ = [
        *fields_of(c_int32, "hidden layers heads kv_heads head_dim inter vocab"),
        *fields_of(c_int32, "max_rows rope_len tp aux_count"),
        ("aux", c_int32 * MOST_AUX_LAYERS),
        *fields_of(c_int32, "experts topk expert_inter shared_inter renormalise route_bytes"),
        ("eps", c_float),
        ("reduced", c_int64),
        *fields_of(c_void_p, "rope embed head final_norm"),
        ("layer", POINTER(TltLayer)),
        *fields_of(c_void_p, "resid part qkv_out x q att mid units"),
        *fields_of(c_void_p, "scores gates shared pair_x pair_mid pair_out chosen place starts active"),
    ]


class TltStep(Structure):
    """`TltStep`."""

    _fields_ = [
        *fields_of(c_int32, "tokens seqs logits_rows max_blocks num_blocks block_size"),
        *fields_of(c_void_p, "token_ids positions slots query_start block_tables logit_rows"),
        *fields_of(c_void_p, "kv logits hidden routed_experts"),
    ]


class TltEagle(Structure):
    """`TltEagle`."""

    _fields_ = [
        ("model", TltModel),
        *fields_of(c_void_p, "fc pair hidden_norm ids"),
        *fields_of(c_int32, "vocab state_width norm_before_residual"),
    ]


class TltPairs(Structure):
    """`TltPairs`."""

    _fields_ = [
        *fields_of(c_int32, "count num_blocks block_size"),
        *fields_of(c_void_p, "tokens positions slots state_slots pages kv"),
    ]


class TltDraft(Structure):
    """`TltDraft`."""

    _fields_ = [
        *fields_of(c_int32, "rows slots catch_up width max_blocks num_blocks block_size longest"),
        ("min_acceptance", c_float),
        *fields_of(c_void_p, "slot positions output_len block_tables keys temperature outputs wanted"),
        *fields_of(c_void_p, "synced first pages kv rates"),
        *fields_of(c_void_p, "counts tokens feature cumulative_acceptance scratch"),
    ]


_FORWARD = [POINTER(TltModel), POINTER(TltStep), c_int, AllReduce]
_SAMPLE = [c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 4, c_int]
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {  # functions `tlt_`...: result and argument types
    "prepare": (c_int, []),
    "form": (c_char_p, []),
    "panel_width": (c_int, []),
    "cell_numbers": (c_int, []),
    "row_multiple": (c_int, []),
    "forward": (c_int, _FORWARD),
    "keyed_sample": (c_int, _SAMPLE),
    "eagle_feed": (c_int, [POINTER(TltEagle), POINTER(TltPairs), c_int]),
    "draft_scratch_bytes": (c_int64, [c_void_p, c_void_p]),
    "draft_rows": (c_int, [c_void_p, c_void_p, c_int]),
    "suffix_new": (c_void_p, [c_int32, c_int32, c_int64]),
    "suffix_free": (None, [c_void_p]),
    "suffix_trie": (c_int32, [c_void_p]),
    "suffix_clear": (None, [c_void_p]),
    "suffix_sequence": (c_int32, [c_void_p, c_int32, c_int32]),
    "suffix_append": (c_int, [c_void_p, c_int32, c_int32, c_void_p, c_int64]),
    "suffix_follow": (c_int, [c_void_p, c_void_p]),
    "suffix_propose": (c_int, [c_void_p, c_void_p]),
    "suffix_length": (c_int64, [c_void_p, c_int32, c_int32]),
}


@cache
def library(bf16: bool = False) -> ctypes.CDLL:
    """The library that computes with fp32 or bf16 numbers, its functions declared. Raises BackendError if it cannot be
    built or loaded.
    """
    if not bf16:
        return _load(())
    lib = _load(BF16)
    if lib.tlt_prepare():
        _log.warning("the system refuses the tiles of AMX: bf16 is computed without them")
        lib = _load((*BF16, "-mno-amx-bf16"))
    _log.info("native decoder: bf16 by %s", lib.tlt_form().decode())
    return lib


def _load(options: tuple[str, ...]) -> ctypes.CDLL:
    path = library_path(options)
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as e:
        mend = f"delete that file, which is then built again, or set {CACHE_VARIABLE} to another directory"
        raise BackendError(f"cannot load the native decoder: {e}; {mend}") from e
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, f"tlt_{name}")
        function.restype, function.argtypes = result, arguments
    return lib


# Element types of arrays by their field's name; all others are int32.
_KINDS = {"keys": np.uint64} | dict.fromkeys(("temperature", "rates", "cumulative_acceptance"), np.float32)


def point_at_arrays(structure: Structure, arrays: Any) -> None:
    """Points the fields of `structure` at the contiguous numpy arrays in the dataclass `arrays`. The caller keeps
    them alive.
    """
    for field in fields(arrays):
        name, array = field.name, getattr(arrays, field.name)
        assert array.dtype == _KINDS.get(name, np.int32) and array.flags.c_contiguous, name
        setattr(structure, name, array.ctypes.data)
