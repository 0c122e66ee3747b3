"""What trained drafters of all kinds share in PyTorch: weights, the policy's LM head, cache, and a draft's frame.

A draft is one copy of its inputs to the device, one or more steps over fixed buffers, which run as they are or by CUDA
graphs (`run_step`), and one copy of all candidates back. The host decides afterwards where each draft ends.

Legend: T pairs, A rows that draft, P the padded number of rows, N drafted tokens, M blocks of a table, H hidden size,
Vd the drafter's vocabulary, C candidates looked at.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_tlt.drafters.decoder import (
    CATCH_UP,
    DrafterDecoder,
    DraftingRows,
    DraftRecorder,
    Pairs,
    RowDrafter,
    RunStep,
    missing_pairs,
    slots_of,
    step_batches,
)
from megatron_tlt.drafters.model import DrafterModel
from megatron_tlt.errors import BackendError
from megatron_tlt.models.decoders.base import Decoder, KVCache
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.models.decoders.keys import row_keys
from megatron_tlt.models.decoders.torch.decoder import TorchDecoder
from megatron_tlt.models.decoders.torch.layers import PLAIN
from megatron_tlt.models.decoders.torch.transfer import upload


class TorchDrafter(DrafterDecoder):
    """Cache: [*cache_parts, (num_blocks + scratch_blocks) * block_size, kv heads, D]."""

    kind = "torch"
    scratch_blocks = 0  # behind the others, for what padding writes

    def __init__(self, policy: Decoder, model: DrafterModel, cache_parts: tuple[int, ...]):
        """The policy's tables are read from `policy` at every call. `model` is moved to its device and type.
        Raises BackendError for a decoder that returns other layers.
        """
        config = model.config
        config.check_states(policy.aux_layers)
        self.policy, self.config, self.device, self.dtype = policy, config, policy.device, policy.dtype
        self.ops = policy.ops if isinstance(policy, TorchDecoder) else PLAIN
        self.model = model.to(policy.device, policy.dtype).requires_grad_(False)
        self._parts = cache_parts
        # Of a reduced vocabulary rows of the policy's LM head, in place since graphs keep the address; of a decoder
        # that does not compute logits of other states all of it. None: the policy, or a head of its own, computes them.
        self._head: Tensor | None = None
        self._head_version: int | None = None  # that it is of
        if config.reduced and not model.head_parameters:
            shape = config.draft_vocab_size, config.policy.hidden_size
            self._head = torch.empty(shape, dtype=policy.dtype, device=policy.device)
        self.run_step: RunStep = lambda _key, step: step()
        self._loaded = False

    def use_graphs(self, run_step: RunStep) -> None:
        self.run_step = run_step

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Zeroed; allocated at once."""
        layer, slots = self.config.layer, (num_blocks + self.scratch_blocks) * block_size
        shape = (*self._parts, slots, layer.num_kv_heads, layer.head_dim)
        return KVCache(num_blocks, block_size, torch.zeros(shape, dtype=self.dtype, device=self.device))

    def kv_bytes_per_block(self, block_size: int) -> int:
        row = self.config.layer.num_kv_heads * self.config.layer.head_dim * self.dtype.itemsize
        return math.prod(self._parts) * block_size * row

    def copy_blocks(self, kv: KVCache, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copies block src[i] to dst[i] in every layer, in order of i."""
        blocks = kv.data.unflatten(-3, (-1, kv.block_size))
        for a, b in zip(src, dst, strict=True):
            blocks[..., b, :, :, :] = blocks[..., a, :, :, :]

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.model.load_full(named)
        self._loaded, self._head_version = True, None

    def refresh_head(self) -> None:
        """Reads the policy's LM head again after a weight sync has replaced it, where the drafter keeps rows of it or
        a copy. Raises BackendError before all weights are loaded. Collective with tensor parallelism.
        """
        self._check_loaded()
        if self.model.head_parameters or self._head_version == self.policy.head_version:
            return
        self._head_version = self.policy.head_version
        if (ids := self.model.token_ids()) is not None:
            torch.index_select(self.policy.lookup_tables()[1], 0, ids, out=self._head)
        elif not isinstance(self.policy, TorchDecoder):
            self._head = self.policy.lookup_tables()[1]

    def _check_loaded(self) -> None:
        if not self._loaded:
            raise BackendError("the drafter is used before its weights were loaded")

    def logits(self, outputs: Tensor) -> Tensor:
        """Float32 [T, Vd] of outputs [T, H], through the policy's LM head."""
        if self._head is not None:
            return linear(outputs, self._head).float()
        assert isinstance(self.policy, TorchDecoder)
        return self.policy.logits(outputs)  # its LM head may be sharded

    @torch.inference_mode()
    def feed(self, pairs: Pairs, pages: Tensor, kv: KVCache) -> None:
        """Caches `pairs`. Raises BackendError before weights were loaded."""
        self._check_loaded()
        self.model.reserve_positions(int(pairs.positions.max(initial=0)) + 1, self.device)
        arrays = (pairs.tokens, pairs.positions, pairs.slots, pairs.state_slots)
        tokens, positions, slots, states = upload(np.stack(arrays), self.device).long()
        self._cache(tokens, positions, slots, states, pages, kv)

    @abstractmethod
    def _cache(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, states: Tensor, pages: Tensor, kv: KVCache
    ) -> None:
        """Caches pairs: int64 [T] each, as in `Pairs`."""


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """The inputs of a draft of N tokens, of each of P rows: views of one int64 array, which is copied to the device
    once. `of` makes them on either side.
    """

    state_slots: Tensor  # [P], of the state of the position before the row's last
    temperature: Tensor  # float64 [P], the same bytes as int64
    tokens: Tensor  # [P], the row's last token
    first_visible: Tensor  # [P], first position that the row attends to
    places: Tensor  # [N, 3, P], of each token: position, slot (where steps cache), and the bits of the noise key
    block_tables: Tensor  # [M, P]

    @classmethod
    def of(cls, array: Tensor, steps: int) -> DraftInputs:
        """The views of `array` int64 [rows(steps, M), P]."""
        states, temperature, tokens, first = array[:4]
        places, tables = array[4 : 4 + 3 * steps], array[4 + 3 * steps :]
        places = places.view(steps, 3, array.shape[1])
        return cls(states, temperature.view(torch.float64), tokens, first, places, tables)

    @staticmethod
    def rows(steps: int, blocks: int) -> int:
        """Rows of the array of `steps` tokens and tables of `blocks` blocks."""
        return 4 + 3 * steps + blocks


class TorchRowDrafter(RowDrafter):
    """Drafts of one set of running rows: missing pairs, inputs, steps, recording."""

    steps_cache = 0  # of a row's missing pairs, the last ones, which the steps cache themselves

    def __init__(self, drafter: TorchDrafter, kv: KVCache, rows: DraftingRows, pages: Tensor):
        self._drafter, self._rows, self._catch_up = drafter, rows, CATCH_UP
        self.point_at(kv, pages)
        self._size = kv.block_size
        self._most, self._max_blocks = rows.block_tables.shape
        self._num_candidates = min(2, drafter.config.draft_vocab_size)  # the second gives the gap
        # Read by the steps: where they are. What lies behind a row's last block is not read.
        self._tables = self._zeros(self._most, self._max_blocks, dtype=torch.int32)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._drafter.device)

    def steps(self) -> list[tuple[Hashable, Callable[[], object]]]:
        """Every static step with its key, the largest first. Sets the inputs to padding."""
        self._pad()
        return [self._static(batch, self._max_blocks) for batch in step_batches(self._most)]

    @torch.inference_mode()
    def draft(self, wanted: np.ndarray, rates: np.ndarray, min_acceptance: float) -> Draft:
        rows, recorder = self._rows, DraftRecorder(len(wanted), rates, min_acceptance)
        active = self._starting(np.flatnonzero(wanted > 0))
        wanted = wanted[active]
        wanted = np.minimum(wanted, recorder.reachable(self._longest(int(wanted.max(initial=0)))))
        if not len(active):
            return recorder.result()
        self._drafter.refresh_head()
        pairs = missing_pairs(rows, active, self._catch_up, self._size, self.steps_cache)
        if pairs is not None:
            self._drafter.feed(pairs, self._pages, self._kv)
        if not wanted.any():
            return recorder.result()
        results = self._run(active, wanted).cpu().numpy()  # the draft's one wait for the device
        at = np.arange(len(active))  # of the drafts that go on
        for number, (scores, candidates) in enumerate(results[: int(wanted.max())]):
            best, score = candidates[at].astype(np.int32), scores[at].astype(np.float32)
            at = at[recorder.record(number, active[at], best, score, wanted[at] > number + 1)]
            if not len(at):
                break
        return recorder.result()

    def _starting(self, rows: np.ndarray) -> np.ndarray:
        """Those of `rows` [A] that have something to start from."""
        return rows

    def _longest(self, wanted: int) -> int:
        """Tokens of the longest draft that is made where `wanted` are."""
        return wanted

    @abstractmethod
    def _run(self, active: np.ndarray, wanted: np.ndarray) -> Tensor:
        """Makes drafts of `wanted` [A] tokens behind rows `active` [A]: scores and candidates, best first, float64
        [N, 2, P, C].
        """

    @abstractmethod
    def _compute(self, batch: int, blocks: int) -> None:
        """The step of so many padded rows and blocks: reads and writes buffers only; running it again gives the same.
        No value comes to the host.
        """

    @abstractmethod
    def _pad(self) -> None:
        """Sets the steps' inputs to padding."""

    def _static(self, batch: int, blocks: int) -> tuple[Hashable, Callable[[], object]]:
        """The step of so many padded rows, with its key: captured steps have the tables' whole width."""
        return ("drafter", batch), partial(self._compute, batch, blocks)

    def _upload(self, active: np.ndarray, wanted: np.ndarray, steps: int, length: int) -> tuple[Tensor, int]:
        """The array of `DraftInputs` [.., P] of `steps` tokens behind rows `active` [A] on the device, in one copy, and
        the number of blocks M of the tables, of `length` positions. Mutates the steps' tables.
        """
        batch, blocks = min(1 << (len(active) - 1).bit_length(), self._most), -(-length // self._size)
        host = torch.zeros(DraftInputs.rows(steps, blocks), batch, dtype=torch.int64)
        self._plan(DraftInputs.of(host, steps), active, wanted)
        array = upload(host.numpy(), self._drafter.device)
        self._tables[:batch, :blocks] = DraftInputs.of(array, steps).block_tables.T
        return array, blocks

    def _plan(self, host: DraftInputs, active: np.ndarray, wanted: np.ndarray) -> None:
        """Writes the inputs of rows `active` [A] into `host`, and padding behind them. Mutates `host`."""
        rows, count = self._rows, len(active)
        position, slot = rows.positions[active], rows.slot[active]
        padding = self._kv.num_blocks if self._drafter.scratch_blocks else 0
        host.state_slots.numpy()[:count] = slots_of(rows, active, position - 1, self._size)
        host.temperature.numpy()[:count] = rows.temperature[active]
        host.tokens.numpy()[:count] = rows.outputs[slot, rows.output_len[active] - 1]
        host.first_visible.fill_(1).numpy()[:count] = rows.first[slot]
        tables = host.block_tables.fill_(padding).numpy()
        tables[:, :count] = rows.block_tables[active, : len(tables)].T
        host.places[:, 1] = padding * self._size
        for step, place in enumerate(host.places.numpy()):
            at = np.flatnonzero(wanted > step)
            now = position[at] + step
            place[0, at] = now
            if self.steps_cache:
                place[1, at] = slots_of(rows, active[at], now, self._size)
            place[2, at] = row_keys(rows.keys[active[at]], rows.output_len[active[at]] + step).view(np.int64)
