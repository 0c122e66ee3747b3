"""`NativeStep`: a whole decoding step of the native decoder in one C call (`csrc/fused.c`), from the engine's arrays.

The forward, the keyed draws, coupled verification and the moves in the cache give bit for bit what the single calls
give; what is saved is the work between them, which is more than the forward itself where models and batches are small.
Legend: D rows (requests), N drafted nodes, T = D + N fed rows, E emitted tokens, W width of a state, V vocabulary.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from megatron_tlt.errors import BackendError
from megatron_tlt.models.base import KVCache
from megatron_tlt.models.native.abi import ERRORS, Fused, library, point_at_arrays
from megatron_tlt.models.native.decoder import NativeDecoder

_INTS = 10  # TLT_FUSED_INTS, rows of the scratch


@dataclass(frozen=True, slots=True)
class RowArrays:
    """The decoding rows as C reads them at every step: arrays that stay where they are, rows from 0 on."""

    token_ids: np.ndarray  # int32 [D], to feed
    positions: np.ndarray  # int32 [D], of that token
    output_len: np.ndarray  # int32 [D], output position of the next token
    block_tables: np.ndarray  # int32 [D, K]
    keys: np.ndarray  # uint64 [D], of the requests
    temperature: np.ndarray  # float32 [D], 0: greedy


Emitted = tuple[np.ndarray, np.ndarray]  # tokens int32 [E], log-probabilities float32 [E]


# Tokens that each row emits int32 [D], the fed rows they are drawn at int32 [E], and of the nodes bool [N]: the node's
# token was emitted, its parent was emitted.
Verdict = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class NativeStep:
    """Decoding steps over one cache and one set of rows. Buffers grow with the largest step. Not thread-safe."""

    def __init__(self, decoder: NativeDecoder, kv: KVCache, rows: RowArrays):
        """`kv` and `rows` keep their memory. Raises BackendError for rows that C could not read, and for a decoder that
        has only a part of the model.
        """
        forward = decoder.structure
        if forward.model.tp != 1:
            raise BackendError("a step in one call needs the whole model: this decoder has a part of it")
        self.sample_seconds = 0.0  # of the last step: what followed its forward
        self._decoder, self._forward, self._rows = decoder, forward, rows
        self._most_rows, max_blocks = rows.block_tables.shape
        sizes = {"max_blocks": max_blocks, "num_blocks": kv.num_blocks, "block_size": kv.block_size}
        self._fused = Fused(**sizes)
        self.point_at(kv)
        point_at_arrays(self._fused, rows)
        self._run = library().tlt_fused_step
        self._arguments = ctypes.byref(forward.model), ctypes.byref(self._fused), decoder.threads
        self._pages: Tensor | None = None  # kept alive for C, as the next
        self._routes: Tensor | None = None
        self._room = 0
        self._make_room(1)

    def point_at(self, kv: KVCache) -> None:
        """Uses the memory of `kv` from now on (empty after its release: no step may follow then)."""
        self._kv = kv.data  # kept alive for C
        self._fused.kv = kv.data.data_ptr() if kv.data.numel() else None

    def write_hidden_to(self, pages: Tensor | None) -> None:
        """States of all fed rows go to `pages` [slots, W] of the compute type, each to its token's slot.

        None: nowhere. Raises BackendError for a tensor that C could not write.
        """
        if pages is not None:
            slots = self._fused.num_blocks * self._fused.block_size
            fits = pages.shape == (slots, self._decoder.state_size) and pages.dtype == self._decoder.dtype
            if not (fits and pages.is_contiguous() and pages.device.type == "cpu"):
                raise BackendError(
                    f"hidden states {list(pages.shape)} {pages.dtype} for a cache of {slots} slots"
                )
        self._pages, self._fused.pages = pages, None if pages is None else pages.data_ptr()

    def write_routes_to(self, pages: Tensor | None) -> None:
        """Experts of all fed rows go to `pages` [slots, route width], each to its token's slot. None: nowhere.

        Raises BackendError for a tensor that C could not write.
        """
        if pages is not None:
            slots = self._fused.num_blocks * self._fused.block_size
            fits = pages.shape[0] == slots and pages.nbytes == slots * self._forward.model.route_bytes
            if not (fits and pages.is_contiguous() and pages.device.type == "cpu"):
                raise BackendError(f"experts {list(pages.shape)} {pages.dtype} for a cache of {slots} slots")
        self._routes, self._fused.route_pages = pages, None if pages is None else pages.data_ptr()

    def decode(self, count: int) -> Emitted:
        """Feeds the first `count` rows their tokens and draws one for each. Mutates the cache. Raises as `verify`."""
        if count > self._room:
            self._make_room(count)
        fused = self._fused
        fused.rows, fused.nodes, fused.is_tree = count, 0, 0
        self._call()
        return self._emitted(count)

    def verify(
        self, counts: np.ndarray, tokens: np.ndarray, parents: np.ndarray | None = None
    ) -> tuple[Emitted, Verdict]:
        """Feeds the first D rows their tokens and their drafted nodes, and emits what the policy draws along them.

        `counts` int32 [D] nodes of each row; `tokens` and, unless all are chains, `parents` (index within the row's
        nodes, -1: the root; before its children) int32 [N]. Node i of a row is cached at the slot of its position
        + 1 + i; accepted branches are moved to where plain decoding would have put them. Mutates the cache. Raises
        BackendError as `NativeDecoder.forward`, and for a draft that is no tree.
        """
        rows, nodes = len(counts), len(tokens)
        if not nodes:
            ones, none = np.ones(rows, np.int32), np.empty(0, bool)
            return self.decode(rows), (ones, np.arange(rows, dtype=np.int32), none, none)
        if rows + nodes > self._room:
            self._make_room(rows + nodes)
        fused = self._fused
        fused.rows, fused.nodes, fused.is_tree = rows, nodes, parents is not None
        self._counts[:rows] = counts
        self._tokens[:nodes] = tokens
        if parents is not None:
            self._parents[:nodes] = parents
        self._call()
        emitted: int = fused.emitted
        verdict = (
            self._out_counts[:rows].copy(),
            self._out_index[:emitted].copy(),
            self._accepted[:nodes].copy(),
            self._reached[:nodes].copy(),
        )
        return self._emitted(emitted), verdict

    def _emitted(self, count: int) -> Emitted:
        return self._out_tokens[:count].copy(), self._out_logprobs[:count].copy()

    def _call(self) -> None:
        fused = self._fused
        if fused.kv is None:
            raise BackendError("a step while the cache's memory is released")
        if not self._decoder.complete:
            raise BackendError("forward before all weights were loaded")
        if fused.rows > self._most_rows:
            raise BackendError(f"native step of {fused.rows} rows, there are {self._most_rows}")
        if code := self._run(*self._arguments):
            raise BackendError(f"native step refused: {ERRORS.get(code, code)}")
        self.sample_seconds = fused.sample_seconds

    def _make_room(self, needed: int) -> None:
        """Buffers for steps of `needed` fed rows and some more."""
        self._room = room = needed + needed // 4 + 16
        model = self._forward.model
        ints = np.empty((_INTS + 6, room + 1), np.int32)
        self._counts, self._tokens, self._parents = ints[_INTS : _INTS + 3]
        self._out_tokens, self._out_index, self._out_counts = ints[_INTS + 3 :]
        flags = np.empty((4, room + 1), bool)
        self._accepted, self._reached = flags[2:]
        self._out_logprobs = np.empty(room, np.float32)
        scratch: dict[str, np.ndarray] = {
            "ints": ints,
            "row_keys": np.empty(room, np.uint64),
            "row_temperature": np.empty(room, np.float32),
            "bytes": flags,
            "logits": np.empty(room * model.vocab, np.float32),
            "sampling": np.empty(library().tlt_sample_scratch_bytes(room, model.vocab), np.uint8),
            "drawn_logprobs": np.empty(room, np.float32),
            "hidden": np.empty((room, self._decoder.state_size), np.float32),
            "routes": np.empty((room, model.route_bytes), np.uint8),
        }
        names = "counts tokens parents out_tokens out_index out_counts out_logprobs accepted reached"
        arrays = scratch | {name: getattr(self, f"_{name}") for name in names.split()}
        self._keep = scratch  # kept alive for C
        for name, array in arrays.items():
            setattr(self._fused, name, array.ctypes.data)
