"""The C side's structures and functions as ctypes sees them. Field order repeats `csrc/tlt.h`."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache

from megatron_tlt.errors import BackendError
from megatron_tlt.models.native.build import library_path

ABI_VERSION = 2

AllReduce = ctypes.CFUNCTYPE(c_int, c_void_p, c_int64)

ERRORS = {
    1: "a token id outside the vocabulary",
    2: "a position outside the rotary table (longer than max_position_embeddings?)",
    3: "a slot outside the KV cache",
    4: "a block table that is too short or names a block outside the KV cache",
    5: "a logit row outside the batch",
    6: "query_start does not cover the rows, or a shape the native decoder cannot hold",
    7: "the tensor-parallel all-reduce failed",
    8: "a parent that is not an earlier row of the sequence at the position before, or a first row with a parent",
    9: "a branch of a draft tree that is more than 64 rows deeper than its root",
    10: "a first visible position below 1 or above that of a pair",
}
BAD_POSITION = 2


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Layer(Structure):
    """`TltLayer`."""

    _fields_ = _fields(c_void_p, "qkv o gate_up down qkv_bias input_norm post_norm q_norm k_norm")


class Model(Structure):
    """`TltModel`."""

    _fields_ = [
        *_fields(c_int32, "is_bf16 hidden layers heads kv_heads head_dim inter vocab embed_rows"),
        *_fields(c_int32, "max_rows rope_len tp"),
        ("eps", c_float),
        *_fields(c_void_p, "rope embed head final_norm"),
        ("layer", POINTER(Layer)),
        *_fields(c_void_p, "resid part qkv_out x q att mid units picked"),
    ]


class Step(Structure):
    """`TltStep`."""

    _fields_ = [
        *_fields(c_int32, "tokens seqs logits_rows max_blocks num_blocks block_size"),
        *_fields(c_void_p, "token_ids positions slots query_start context_lens block_tables logit_rows"),
        *_fields(c_void_p, "parents branch kv logits hidden all_hidden"),
        ("logits_stride", c_int64),
    ]


class Eagle(Structure):
    """`TltEagle`."""

    _fields_ = [("model", Model), *_fields(c_void_p, "fc pair")]


class EagleStep(Structure):
    """`TltEagleStep`."""

    _fields_ = [("step", Step), *_fields(c_void_p, "states first_visible")]


class DraftCall(Structure):
    """`TltDraft`."""

    _fields_ = [
        *_fields(c_int32, "topk depth"),
        ("min_cumulative_acceptance", c_float),
        *_fields(c_void_p, "keys output_positions temperature max_len rates"),
        *_fields(c_void_p, "lengths tokens gaps cumulative_acceptance logits"),
        *_fields(c_void_p, "last_logits last_hidden work best"),
    ]


@cache
def library() -> ctypes.CDLL:
    """The compiled library with its functions declared. Raises BackendError if it cannot be built or loaded."""
    path = library_path()
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as e:
        raise BackendError(f"cannot load the native decoder {path}: {e}") from e
    if lib.tlt_abi_version() != ABI_VERSION:
        raise BackendError(f"{path} has ABI {lib.tlt_abi_version()}, this package needs {ABI_VERSION}")
    lib.tlt_isa.restype = c_char_p
    lib.tlt_forward.argtypes = [POINTER(Model), POINTER(Step), c_int, AllReduce]
    lib.tlt_pack.argtypes = [c_void_p, c_void_p, c_int, c_int, *[c_int64] * 6, c_int]
    lib.tlt_pack.restype = None
    lib.tlt_copy_blocks.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int64]
    lib.tlt_copy_blocks.restype = None
    lib.tlt_copy_slots.argtypes = [c_void_p, POINTER(Model), c_int64, c_int64, c_void_p, c_void_p, c_int64]
    lib.tlt_eagle_forward.argtypes = [POINTER(Eagle), POINTER(EagleStep), c_int, AllReduce]
    lib.tlt_eagle_draft.argtypes = [POINTER(Eagle), POINTER(EagleStep), POINTER(DraftCall), c_int]
    lib.tlt_keyed_topk.argtypes = [c_void_p, *[c_int64] * 3, *[c_void_p] * 3, c_int, *[c_void_p] * 4, c_int]
    lib.tlt_keyed_topk.restype = None
    lib.tlt_topk_scratch_bytes.argtypes = [c_int64, c_int64]
    lib.tlt_topk_scratch_bytes.restype = c_int64
    lib.tlt_keyed_sample.argtypes = [c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 5, c_int]
    lib.tlt_keyed_sample.restype = None
    lib.tlt_sample_scratch_bytes.argtypes = [c_int64, c_int64]
    lib.tlt_sample_scratch_bytes.restype = c_int64
    return lib
