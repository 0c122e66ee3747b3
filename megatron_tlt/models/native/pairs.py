"""`NativePairs`: the EAGLE drafter's drafts straight from the engine's rows, in one C call (`csrc/pairs.c`).

Which pairs are missing, where they are cached, the draft itself and its flat form: at a few requests these took longer
in array operations than the drafter's own arithmetic. The results are bit for bit those of `NativeEagle.draft`.

Legend: B rows, S slots (a request keeps its slot, rows are dense), A rows that draft, W window, N drafted tokens,
H hidden size, L longest draft, K candidates.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, byref, c_int, c_int32, c_void_p
from dataclasses import dataclass, fields
from functools import cache

import numpy as np
from torch import Tensor

from megatron_tlt.errors import BackendError
from megatron_tlt.models.base import KVCache
from megatron_tlt.models.eagle.base import DraftRows, EagleDecoder
from megatron_tlt.models.native.abi import BAD_POSITION, ERRORS, library
from megatron_tlt.models.native.eagle import DraftSpace, NativeEagle

_INTS = 7  # TLT_PAIRS_INTS

# Of all rows: counts int32 [B]; of each drafted token: tokens int32, cumulative acceptance float32, depths int32 (from
# 1), and place * BUCKETS + bucket of its gap int32, [N] each.
Chains = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class _Pairs(Structure):
    """`TltPairs`."""

    _fields_ = [
        *_fields(c_int32, "rows slots window width max_blocks num_blocks block_size drafting nodes"),
        *_fields(c_void_p, "slot positions output_len block_tables keys temperature outputs wanted"),
        *_fields(c_void_p, "synced first pages kv pairs ints tables own_keys own_temperature chains"),
    ]


@dataclass(frozen=True, slots=True)
class DraftingRows:
    """Rows and slots as C reads them at every call: contiguous arrays that stay where they are."""

    slot: np.ndarray  # int32 [B], of the row's request
    positions: np.ndarray  # int32 [B], of the row's last token
    output_len: np.ndarray  # int32 [B], tokens drawn so far
    block_tables: np.ndarray  # int32 [S, K]
    keys: np.ndarray  # uint64 [B], of the requests
    temperature: np.ndarray  # float32 [B], 0: greedy
    synced: np.ndarray  # int32 [S], last position whose pair is cached; written
    first: np.ndarray  # int32 [S], first position that the drafter sees; written


@cache
def _functions() -> ctypes.CDLL:
    """The library with this module's functions declared. Raises BackendError as `library`."""
    lib = library()
    lib.tlt_draft_rows.argtypes = [c_void_p, c_void_p, c_void_p, c_int]
    return lib


class NativePairs:
    """Drafts for one set of rows over one cache. Not thread-safe."""

    def __init__(self, eagle: NativeEagle, kv: KVCache, rows: DraftingRows, pages: Tensor, window: int):
        """All keep their memory. `pages` [slots of `kv`, H] in the drafter's type: the policy's hidden states, each at
        its token's slot. Of a row at most its last `window` pairs are fed. Raises BackendError for arrays that C could
        not read.
        """
        slots, max_blocks = rows.block_tables.shape
        cached = kv.num_blocks * kv.block_size
        fits = pages.shape == (cached, eagle.config.hidden_size) and pages.dtype == eagle.dtype
        if not (fits and pages.is_contiguous()):
            raise BackendError(
                f"hidden states {list(pages.shape)} {pages.dtype} for a cache of {cached} slots"
            )
        self._eagle, self._rows = eagle, rows
        self._lib, self._slots = _functions(), slots
        sizes = {"max_blocks": max_blocks, "num_blocks": kv.num_blocks, "block_size": kv.block_size}
        self._call = _Pairs(slots=slots, window=window, **sizes)
        self.point_at(kv, pages)
        scratch = {
            "pairs": np.zeros((4, slots * window), np.int32),
            "ints": np.zeros((_INTS, slots + 1), np.int32),
            "tables": np.zeros((slots, max_blocks), np.int32),
            "own_keys": np.zeros(slots, np.uint64),
            "own_temperature": np.zeros(slots, np.float32),
        }
        kinds = {"keys": np.uint64, "temperature": np.float32}
        given = {field.name: getattr(rows, field.name) for field in fields(DraftingRows)}
        for name, array in given.items():
            _check(name, array, kinds.get(name, np.int32))
        for name, array in (given | scratch).items():
            setattr(self._call, name, array.ctypes.data)
        self._keys = self._call.keys
        self._scratch, self._drafting = scratch, scratch["ints"][0]
        self._wanted = np.zeros(slots, np.int32)
        self._call.wanted = self._wanted.ctypes.data
        self._outputs = self._flat = np.zeros(0, np.int32)
        self._at_flat = self._flat.ctypes.data
        self._pointer = byref(self._call)

    def point_at(self, kv: KVCache, pages: Tensor) -> None:
        """From now on drafts use this memory (none after a release: no draft may follow then)."""
        self._kv, self._pages = kv.data, pages  # kept alive
        self._call.pages, self._call.kv = pages.data_ptr(), kv.data.data_ptr()

    def chains(
        self, outputs: np.ndarray, wanted: np.ndarray, rates: np.ndarray, min_cumulative_acceptance: float
    ) -> Chains:
        """Drafts chains of up to `wanted` int [B] tokens; a row whose last pair is cached already gets none.

        `outputs` int32 [S, any] holds the tokens drawn so far; `rates` and `min_cumulative_acceptance` as in
        `DraftParams`. Writes the cache, `synced` and `first`. Raises BackendError as `NativeEagle.draft`.
        """
        rows, depth = len(wanted), max(wanted.tolist(), default=0)
        if len(self._flat) < rows * (1 + 4 * depth):
            self._flat = np.zeros(2 * rows * (1 + 4 * depth), np.int32)
            self._at_flat = self._flat.ctypes.data
        self._call.chains = self._at_flat
        self._run(outputs, wanted, depth, 1, rates, min_cumulative_acceptance)
        n = self._call.nodes
        out = self._flat[: rows + 4 * n].copy()
        a, b, c = rows + n, rows + 2 * n, rows + 3 * n
        return out[:rows], out[rows:a], out[a:b].view(np.float32), out[b:c], out[c:]

    def rows(
        self,
        outputs: np.ndarray,
        wanted: np.ndarray,
        topk: int,
        rates: np.ndarray,
        min_cumulative_acceptance: float,
        keys: np.ndarray | None = None,
        want_logits: bool = False,
    ) -> tuple[np.ndarray, DraftRows]:
        """As `chains`, with all that `DraftRows` holds; first the rows int32 [A] that it is of, in order.

        `keys` uint64 [B] are drawn with instead of the requests'.
        """
        depth, logits = max(wanted.tolist(), default=0), None
        if want_logits:
            logits = np.zeros((len(wanted), depth, self._eagle.config.vocab_size), np.float32)
        if keys is not None:
            _check("keys", keys, np.uint64)
            self._call.keys = keys.ctypes.data
        self._call.chains = None
        try:
            space = self._run(outputs, wanted, depth, topk, rates, min_cumulative_acceptance, logits)
        finally:
            self._call.keys = self._keys
        drafting: int = self._call.drafting
        found = space.results(len(wanted), depth, topk, logits, drafting)
        return self._drafting[:drafting].copy(), found

    def _run(
        self,
        outputs: np.ndarray,
        wanted: np.ndarray,
        depth: int,
        topk: int,
        rates: np.ndarray,
        min_cumulative_acceptance: float,
        logits: np.ndarray | None = None,
    ) -> DraftSpace:
        call, rows = self._call, len(wanted)
        if rows > self._slots:
            raise BackendError(f"drafts for {rows} rows, there are {self._slots}")
        if outputs is not self._outputs:
            self._point_at(outputs)
        call.rows = rows
        self._wanted[:rows] = wanted
        space = self._eagle.open_call(rows, depth, topk, min_cumulative_acceptance, rates, logits)
        code = self._eagle.run_call(self._lib.tlt_draft_rows, self._pointer)
        if code == BAD_POSITION and self._eagle.grow_rope(int(self._rows.positions[:rows].max()) + 1, depth):
            code = self._eagle.run_call(self._lib.tlt_draft_rows, self._pointer)
        if code:
            raise BackendError(f"native drafter refused: {ERRORS.get(code, code)}")
        return space

    def _point_at(self, outputs: np.ndarray) -> None:
        """The output buffer was widened, into another array."""
        _check("outputs", outputs, np.int32)
        if len(outputs) != self._slots:
            raise BackendError(f"outputs of {len(outputs)} slots, there are {self._slots}")
        self._outputs = outputs
        self._call.outputs, self._call.width = outputs.ctypes.data, outputs.shape[1]


def native_pairs(
    decoder: EagleDecoder, kv: KVCache, rows: DraftingRows, pages: Tensor, window: int
) -> NativePairs | None:
    """Where one rank of the native decoder drafts; None for any other, which takes the pairs as tensors."""
    if not isinstance(decoder, NativeEagle) or not decoder.is_whole:
        return None
    return NativePairs(decoder, kv, rows, pages, window)


def _check(name: str, array: np.ndarray, kind: type) -> None:
    if array.dtype != kind or not array.flags.c_contiguous:
        raise BackendError(f"rows: {name} must be contiguous {np.dtype(kind)}, not {array.dtype}")
