"""The suffix tries of the C library (`csrc/suffix.h`) as ctypes sees them. Field order repeats `SuffixRows`."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_void_p

from megatron_tlt.errors import BackendError
from megatron_tlt.models.decoders.native.abi import fields_of

MAX_DEPTH = 64
MAX_LENGTH = 32  # tokens drafted in a row
ODDS, STEPS = 8, 5  # buckets of the table of match rates

BAD_TOKEN, BAD_HANDLE, NO_MEMORY = -1, -2, -3
_ERRORS = {
    BAD_TOKEN: "a token id outside the vocabulary",
    BAD_HANDLE: "no such trie or sequence, or a number out of range",
    NO_MEMORY: "no memory left for suffix tries",
}


class SuffixRows(Structure):
    """`SuffixRows`."""

    _fields_ = [
        *fields_of(c_void_p, "slots handles outputs num_read output_len keys temperature lengths rates"),
        *fields_of(c_void_p, "counts tokens feature cumulative_acceptance"),
        *fields_of(c_int32, "rows width"),
        ("min_cumulative_acceptance", c_float),
    ]


def check(code: int) -> int:
    """`code` if it is no error. Raises BackendError otherwise."""
    if code < 0:
        raise BackendError(f"suffix drafter: {_ERRORS[code]}")
    return code
