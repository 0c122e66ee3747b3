"""`NativeEagle`: a trained drafter on CPU, in C (`csrc/eagle.c`), beside the policy's `NativeDecoder`.

One call makes the drafts of all running rows from the engine's own arrays: it finds the missing pairs, caches their
keys and values, and runs forward, LM head and keyed candidates of every drafted token. Like the policy's, its results
do not depend on batch or threads, bit for bit.

Legend: T pairs, B running rows, S slots, N drafted tokens, H hidden size, D longest draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ctypes import byref
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.drafters.decoder import (
    BUCKETS,
    CATCH_UP,
    POSITIONS,
    DrafterDecoder,
    DraftingRows,
    Pairs,
    RowDrafter,
)
from megatron_tlt.drafters.eagle.config import Eagle3Config
from megatron_tlt.drafters.model import DrafterConfig
from megatron_tlt.errors import BackendError
from megatron_tlt.models.decoders.base import KVCache, Shard
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.models.decoders.native.abi import (
    ERRORS,
    TltDraft,
    TltEagle,
    TltPairs,
    library,
    point_at_arrays,
)
from megatron_tlt.models.decoders.native.decoder import NativeDecoder, Numbers, copy_blocks
from megatron_tlt.models.decoders.native.parts import (
    Forward,
    PackedLayers,
    Packer,
    kv_bytes_per_block,
    new_kv_cache,
    pad,
)


class NativeEagle(DrafterDecoder):
    """EAGLE and EAGLE-3 in C."""

    kind = "native"

    def __init__(self, policy: NativeDecoder, config: DrafterConfig, threads: int = 1):
        """The policy's embedding and LM head are read where they are, so it must stay alive. Raises BackendError for a
        decoder that returns other layers, ConfigError for heads that C has no room for.
        """
        config.check_states(policy.aux_layers)
        self.policy, self.threads = policy, max(1, threads)
        self.config, self.dtype = config, policy.dtype
        self.lib = library(self.dtype == torch.bfloat16)
        h, is_eagle3 = config.policy.hidden_size, isinstance(config, Eagle3Config)
        positions = policy.config.max_position_embeddings  # those of the engine's context
        self._one = replace(config.layer, vocab_size=config.draft_vocab_size, max_position_embeddings=positions)
        self._whole = Shard(self._one, 0, 1)
        self._packer = Packer(self.dtype)
        inputs, features = (2 * h, 3 * h) if is_eagle3 else (h, 2 * h)
        self._layers = PackedLayers(
            self._one, self._whole, self._packer, (h, features), input_norm=is_eagle3, inputs=inputs
        )
        self._forward = Forward(self._one, self._whole, None, self._layers)
        embed, head = policy.tables
        self._own: dict[str, Tensor] = {}  # norms, head and token ids, kept alive for C
        self._head_version: int | None = None  # of the policy's LM head, whose rows a reduced kind eagle has
        self._copies_head = config.reduced and not is_eagle3
        if is_eagle3 or config.reduced:
            head = self._own["lm_head"] = self._packer.zeros(config.draft_vocab_size, h)
        if is_eagle3:
            self._own |= {"hidden_norm": torch.zeros(pad(h)), "norm": torch.zeros(pad(h))}
            self._forward.model.final_norm = self._own["norm"].data_ptr()
        self._forward.model.embed = embed.data_ptr()
        self._forward.model.head = head.data_ptr()
        self.structure = TltEagle(self._forward.model, self._layers.extra.data_ptr())
        self.structure.pair = self._forward.buffer(pad(3 * h) + 64)
        self.structure.vocab, self.structure.state_width = config.policy.vocab_size, policy.state_size
        if isinstance(config, Eagle3Config):
            self.structure.norm_before_residual = config.norm_before_residual
            self.structure.hidden_norm = self._own["hidden_norm"].data_ptr()
        self._loaded = False

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Nothing changes if it raises."""
        given = dict(named)
        self.config.check(given)
        for name, tensor in given.items():
            self._load(name, tensor.detach())
        self._loaded, self._head_version = True, None

    def refresh_head(self) -> None:
        """Copies the rows of a reduced vocabulary from the policy's LM head after a weight sync has replaced it."""
        if self._copies_head and self._loaded and self._head_version != self.policy.head_version:
            self._head_version = self.policy.head_version
            ids = self._own["ids"][: self.config.draft_vocab_size]
            rows = self.policy.lookup_tables()[1].index_select(0, ids)
            self._packer.pack(self._own["lm_head"], rows)

    def _load(self, name: str, tensor: Tensor) -> None:
        if name == "d2t":
            ids = self._own["ids"] = torch.zeros(pad(len(tensor)), dtype=torch.int32)
            ids[: len(tensor)] = torch.arange(len(tensor)) + tensor.cpu()
            self.structure.ids = ids.data_ptr()
            return
        if name == "t2d":  # the inverse of d2t
            return
        part, kind = name.split(".")[-2:]
        if part == "fc":
            self._packer.pack(self._layers.extra, tensor)
        elif part == "lm_head":
            self._packer.pack(self._own[part], tensor)
        elif part in ("hidden_norm", "norm"):
            self._own[part][: len(tensor)].copy_(tensor)
        else:
            self._layers.load(0, part, kind, tensor)

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Memory of one block, heads padded to the tiles' width."""
        return kv_bytes_per_block(self._one, self._whole, block_size, self.dtype)

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Zeroed, one layer. 16 must divide `block_size`."""
        return new_kv_cache(num_blocks, block_size, self.kv_bytes_per_block(block_size))

    def copy_blocks(self, kv: KVCache, src: Numbers, dst: Numbers) -> None:
        """Copies block src[i] to dst[i], in order of i."""
        copy_blocks(kv, src, dst, 1)

    def feed(self, pairs: Pairs, pages: Tensor, kv: KVCache) -> None:
        """Raises BackendError for pairs that C could not read."""
        self.check_pages(pages, kv)
        call = TltPairs(count=len(pairs.tokens), num_blocks=kv.num_blocks, block_size=kv.block_size)
        assert len({len(getattr(pairs, field.name)) for field in fields(pairs)}) == 1
        point_at_arrays(call, pairs)
        call.pages = pages.data_ptr()
        call.kv = kv.data.data_ptr()
        self.run(partial(self.lib.tlt_eagle_feed, self.structure, call, self.threads))

    def row_drafter(self, kv: KVCache, rows: DraftingRows, pages: Tensor) -> NativeRowDrafter:
        return NativeRowDrafter(self, kv, rows, pages)

    def check_pages(self, pages: Tensor, kv: KVCache) -> None:
        """Asserts that `pages` are hidden states of the slots of `kv`, in the drafter's type."""
        assert pages.shape == (kv.num_blocks * kv.block_size, self.policy.state_size)
        assert pages.dtype == self.dtype and pages.is_contiguous()

    def run(self, call: Callable[[], int]) -> None:
        """Makes a call into C. Raises BackendError if C refuses it, and before all weights are loaded."""
        if not self._loaded or not self.policy.complete:
            raise BackendError("the drafter is used before its weights, or the policy's, were loaded")
        if code := call():
            raise BackendError(f"native drafter refused: {ERRORS.get(code, code)}")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Arrays that a draft reads beside the rows'."""

    wanted: np.ndarray  # int32 [S], of each row the most tokens to draft
    rates: np.ndarray  # float32 [POSITIONS, BUCKETS]


@dataclass(frozen=True, slots=True)
class _Drafted:
    """Arrays that a draft writes: N drafted tokens, row after row."""

    counts: np.ndarray  # int32 [S], tokens of each row
    tokens: np.ndarray  # int32 [at least N]
    feature: np.ndarray  # int32 [at least N]
    cumulative_acceptance: np.ndarray  # float32 [at least N]

    @classmethod
    def empty(cls, slots: int, room: int) -> _Drafted:
        """Arrays for `room` tokens of `slots` rows."""
        return cls(
            counts=np.zeros(slots, np.int32),
            tokens=np.zeros(room, np.int32),
            feature=np.zeros(room, np.int32),
            cumulative_acceptance=np.zeros(room, np.float32),
        )

    def draft(self, rows: int) -> Draft:
        """A copy of the drafts of `rows` rows."""
        counts = self.counts[:rows].copy()
        total = int(counts.sum())
        return Draft(
            counts,
            self.tokens[:total].copy(),
            self.cumulative_acceptance[:total].copy(),
            self.feature[:total].copy(),
        )


class NativeRowDrafter(RowDrafter):
    """C reads all arrays by address; those that a draft writes grow with the largest draft."""

    def __init__(self, eagle: NativeEagle, kv: KVCache, rows: DraftingRows, pages: Tensor):
        slots, max_blocks = rows.block_tables.shape
        eagle.check_pages(pages, kv)
        self._eagle, self._rows, self._lib, self._slots = eagle, rows, eagle.lib, slots
        self._call = TltDraft(
            slots=slots,
            catch_up=CATCH_UP,
            width=rows.outputs.shape[1],
            max_blocks=max_blocks,
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
        )
        self._wanted = _Wanted(np.zeros(slots, np.int32), np.zeros((POSITIONS, BUCKETS), np.float32))
        self._drafted = _Drafted.empty(slots, 0)
        for arrays in (rows, self._wanted, self._drafted):
            point_at_arrays(self._call, arrays)
        self._scratch = np.zeros(0, np.uint8)
        self._shape = (0, 0)
        self._arguments = byref(eagle.structure), byref(self._call)
        self._in_c = partial(self._lib.tlt_draft_rows, *self._arguments, eagle.threads)
        self.point_at(kv, pages)

    def point_at(self, kv: KVCache, pages: Tensor) -> None:
        super().point_at(kv, pages)  # keeps them alive
        self._call.pages = pages.data_ptr()
        self._call.kv = kv.data.data_ptr()

    def draft(self, wanted: np.ndarray, rates: np.ndarray, min_acceptance: float) -> Draft:
        count, longest = len(wanted), max(wanted.tolist(), default=0)
        assert count <= self._slots and rates.shape == self._wanted.rates.shape
        if self._shape != (count, longest):
            self._make_room(count, longest)
        self._wanted.wanted[:count] = wanted
        self._wanted.rates[:] = rates
        self._call.min_acceptance = min_acceptance
        self._eagle.refresh_head()
        self._eagle.run(self._in_c)
        return self._drafted.draft(count)

    def _make_room(self, count: int, longest: int) -> None:
        self._shape = count, longest
        self._call.rows, self._call.longest = count, longest
        if len(self._drafted.tokens) < count * longest:
            self._drafted = _Drafted.empty(self._slots, 2 * count * longest)
            point_at_arrays(self._call, self._drafted)
        if len(self._scratch) < (size := self._lib.tlt_draft_scratch_bytes(*self._arguments)):
            self._scratch = np.empty(2 * size, np.uint8)
            self._call.scratch = self._scratch.ctypes.data
