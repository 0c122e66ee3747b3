"""The suffix tries of the C library (`csrc/suffix.h`) as ctypes sees them. Field order repeats `SuffixAsk`."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache

from megatron_tlt.errors import BackendError
from megatron_tlt.models.native.abi import Signature, declare, fields_of, library

MAX_DEPTH = 64
MAX_TOPK = 8
MAX_LENGTH = 64
ODDS, STEPS, RATES = 8, 5, 8  # buckets of the table of match rates
TRUNK = ODDS * STEPS * STEPS

BAD_TOKEN, BAD_HANDLE, NO_MEMORY = -1, -2, -3
_ERRORS = {
    BAD_TOKEN: "a token id outside the vocabulary",
    BAD_HANDLE: "no such trie or sequence, or a number out of range",
    NO_MEMORY: "no memory left for suffix tries",
}


class Ask(Structure):
    """`SuffixAsk`."""

    _fields_ = [
        *fields_of(c_void_p, "slots handles keys positions temperature lengths rates"),
        *fields_of(c_void_p, "counts tokens depths parents feature cumulative_acceptance"),
        *fields_of(c_int32, "rows topk longest budget"),
        ("min_cumulative_acceptance", c_float),
    ]


_HANDLE = c_int32
_SIGNATURES: dict[str, Signature] = {
    "new": (c_void_p, [c_int32, c_int32, c_int64]),
    "free": (None, [c_void_p]),
    "trie": (c_int32, [c_void_p]),
    "drop": (None, [c_void_p, _HANDLE]),
    "renew": (c_int32, [c_void_p, _HANDLE]),
    "sequence": (c_int32, [c_void_p, _HANDLE, _HANDLE, c_int32]),
    "append": (c_int, [c_void_p, _HANDLE, _HANDLE, c_void_p, c_int64]),
    "follow": (c_int, [c_void_p, c_int32, *[c_void_p] * 5, c_int64]),
    "propose": (c_int, [c_void_p, POINTER(Ask)]),
    "length": (c_int64, [c_void_p, _HANDLE, _HANDLE]),
    "count": (c_int64, [c_void_p, _HANDLE, c_void_p, c_int32]),
    "nodes": (c_int64, [c_void_p, _HANDLE]),
    "bytes": (c_int64, [c_void_p]),
}


@cache
def suffix_library() -> ctypes.CDLL:
    """The compiled library with the functions of the suffix tries declared. Raises BackendError as `library`."""
    lib = library()
    declare(lib, "tlt_suffix", _SIGNATURES)
    return lib


def check(code: int) -> int:
    """`code` if it is no error. Raises BackendError otherwise."""
    if code < 0:
        raise BackendError(f"suffix drafter: {_ERRORS[code]}")
    return code
