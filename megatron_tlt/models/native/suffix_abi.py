"""The suffix tries of the C library (`csrc/suffix.h`) as ctypes sees them. Field order repeats `SuffixAsk`."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache

from megatron_tlt.errors import BackendError
from megatron_tlt.models.native.abi import library

MAX_DEPTH = 64
MAX_TOPK = 8
MAX_LENGTH = 64
ODDS, STEPS, RATES = 8, 5, 8  # buckets of the table of match rates
TRUNK = ODDS * STEPS * STEPS
FEATURES = TRUNK + (MAX_TOPK - 1) * RATES

BAD_TOKEN, BAD_HANDLE, NO_MEMORY = -1, -2, -3
_ERRORS = {
    BAD_TOKEN: "a token id outside the vocabulary",
    BAD_HANDLE: "no such trie or sequence, or a number out of range",
    NO_MEMORY: "no memory left for suffix tries",
}


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Ask(Structure):
    """`SuffixAsk`."""

    _fields_ = [
        *_fields(c_void_p, "slots handles keys positions temperature lengths rates"),
        *_fields(c_void_p, "counts tokens depths parents feature cumulative_acceptance"),
        *_fields(c_int32, "rows topk longest budget"),
        ("min_cumulative_acceptance", c_float),
    ]


@cache
def suffix_library() -> ctypes.CDLL:
    """The compiled library with the functions of the suffix tries declared. Raises BackendError as `library`."""
    return declare(library())


def declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the functions of the suffix tries on `lib`, and returns it."""
    pool, handle = c_void_p, c_int32
    signatures: dict[str, tuple[type | None, list[type]]] = {
        "new": (c_void_p, [c_int32, c_int32, c_int64]),
        "free": (None, [pool]),
        "trie": (c_int32, [pool]),
        "drop": (None, [pool, handle]),
        "renew": (c_int32, [pool, handle]),
        "sequence": (c_int32, [pool, handle, handle, c_int32]),
        "append": (c_int, [pool, handle, handle, c_void_p, c_int64]),
        "follow": (c_int, [pool, c_int32, *[c_void_p] * 5, c_int64]),
        "propose": (c_int, [pool, POINTER(Ask)]),
        "length": (c_int64, [pool, handle, handle]),
        "count": (c_int64, [pool, handle, c_void_p, c_int32]),
        "nodes": (c_int64, [pool, handle]),
        "bytes": (c_int64, [pool]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, f"tlt_suffix_{name}")
        function.restype, function.argtypes = result, arguments
    return lib


def check(code: int) -> int:
    """`code` if it is no error. Raises BackendError otherwise."""
    if code < 0:
        raise BackendError(f"suffix drafter: {_ERRORS[code]}")
    return code
