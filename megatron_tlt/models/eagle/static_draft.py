"""One drafted position of many chains in fixed buffers, so that a CUDA graph can hold it.

    host: tokens, positions, slots, noise keys --one copy--> buffers --graph--> candidates --one copy--> host

Which chains go on is the host's decision, as it is without graphs; chains that have ended are padding until the whole
draft has.

Legend: A chains, B their bucket, M blocks of a table (bucket), H hidden size, V vocabulary, C candidates looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.models.base import KVCache
from megatron_tlt.models.inputs import DecoderInput
from megatron_tlt.models.keyed_noise import perturbed
from megatron_tlt.models.torch.attention import StaticPlan

if TYPE_CHECKING:
    from megatron_tlt.models.eagle.torch_drafter import TorchEagle

RunStep = Callable[[Hashable, Callable[[], object]], object]
CANDIDATES = 4  # looked at; more than `topk` only to tell the gap between best and second
_FIRST_BLOCKS = 8  # smallest bucket of a table; the next ones double
_TOKEN, _POSITION, _SLOT, _KEY = range(4)


class StaticPairPlan(StaticPlan):
    """As its base for one row a sequence, but a row sees no pair before its sequence's first visible one."""

    def __init__(self, batch: DecoderInput, first_visible: Tensor, block_size: int, group: int):
        super().__init__(batch, block_size, 1, group)
        cached = batch.block_tables.shape[1] * block_size
        at = torch.arange(cached + 1, device=first_visible.device)
        seen = (at >= first_visible[:, None]) | (at == cached)  # the last column is the row itself
        self._mask = self._mask & seen[:, None, None]


class StaticDraft:
    """The buffers, and the step that `run_step` may capture by its key. One draft at a time."""

    def __init__(self, eagle: TorchEagle, kv: KVCache, run_step: RunStep, max_batch: int, max_context: int):
        """`kv` is the cache that all drafts use; graphs keep its address. `max_context` counts drafted tokens, too."""
        self._eagle, self.kv, self._run_step = eagle, kv, run_step
        config, device = eagle.config, eagle.device
        self.max_batch, self.max_blocks = max_batch, -(-max_context // kv.block_size)
        self._host = torch.zeros(4, max_batch, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers = torch.zeros(4, max_batch, dtype=torch.int64, device=device)
        self._tables = torch.zeros(max_batch, self.max_blocks, dtype=torch.int32, device=device)
        self._first = torch.ones(max_batch, dtype=torch.int32, device=device)
        self._temperature = torch.zeros(max_batch, device=device)
        self._hidden = torch.zeros(2, max_batch, config.hidden_size, dtype=eagle.dtype, device=device)
        self._logits = torch.zeros(max_batch, config.vocab_size, device=device)
        self._candidates = min(CANDIDATES, config.vocab_size)
        self._best = torch.zeros(2, max_batch, CANDIDATES, dtype=torch.float64, device=device)
        eagle.model.reserve_positions(max_context, device)
        self._shape = (0, 0)

    def fits(self, chains: int, longest: int) -> bool:
        """Whether `chains` of at most `longest` positions, drafted tokens included, can be drafted here."""
        return chains <= self.max_batch and longest <= self.max_blocks * self.kv.block_size

    def begin(
        self, tables: Tensor, first_visible: Tensor, temperature: Tensor, hidden: Tensor, longest: int
    ) -> None:
        """Takes what stays the same over a draft, [A] on the device, and the hidden states [A, H] it starts from."""
        count, scratch = len(hidden), self.kv.num_blocks
        blocks = _FIRST_BLOCKS
        while blocks * self.kv.block_size < longest:
            blocks *= 2
        batch = min(self.max_batch, max(1, 1 << (count - 1).bit_length()))
        self._shape = (batch, min(blocks, self.max_blocks))
        self._tables.fill_(scratch)
        width = min(tables.shape[1], self.max_blocks)
        self._tables[:count, :width] = tables[:, :width]
        self._first[:count], self._temperature[:count] = first_visible, temperature
        self._hidden[1, :count] = hidden

    def step(
        self, at: np.ndarray, tokens: np.ndarray, positions: np.ndarray, slots: np.ndarray, keys: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Tensor]:
        """Feeds `tokens` at rows `at` [A'] of the draft. Their candidates: tokens, scores [A', C], logits [A', V]."""
        batch, blocks = self._shape
        host = self._host.numpy()
        host[_TOKEN, :batch], host[_POSITION, :batch], host[_KEY, :batch] = 0, 0, 0
        host[_SLOT, :batch] = self.kv.num_blocks * self.kv.block_size
        for row, values in (
            (_TOKEN, tokens),
            (_POSITION, positions),
            (_SLOT, slots),
            (_KEY, keys.view(np.int64)),
        ):
            host[row, at] = values
        self._numbers.copy_(self._host, non_blocking=True)
        self._hidden[0, :batch].copy_(self._hidden[1, :batch])
        self._run_step(("eagle", batch, blocks), lambda: self._compute(batch, blocks))
        found, scores = self._eagle.to_host(self._best[:, :batch, : self._candidates].contiguous())
        return found[at], scores[at], self._logits[torch.from_numpy(at).to(self._logits.device)]

    def _compute(self, batch: int, blocks: int) -> None:
        """The step: reads and writes buffers only, and gives the same however often it runs."""
        eagle, cache = self._eagle, self.kv.data
        token, position, slot, key = self._numbers[:, :batch]
        tables, first = self._tables[:batch, :blocks], self._first[:batch]
        rows = torch.arange(batch + 1, dtype=torch.int32, device=tables.device)
        fed = DecoderInput.of([token, position, slot, rows, position + 1, tables, rows[:batch]])
        plan = eagle.static_plan(fed, first, self.kv.block_size)
        model, rope = eagle.model, eagle.model.rope(position)
        x = model.join(eagle.embed[token], self._hidden[0, :batch])
        cache[0][slot], cache[1][slot] = model.keys_values(x, rope)
        hidden = model.finish(x, plan.attend(model.queries(x, rope), cache[0], cache[1]))
        logits = eagle.logits(hidden)
        scores = perturbed(logits, key, self._temperature[:batch])
        best, chosen = scores.topk(self._candidates, dim=-1)
        self._hidden[1, :batch].copy_(hidden)
        self._logits[:batch].copy_(logits)
        self._best[0, :batch, : self._candidates].copy_(best)
        self._best[1, :batch, : self._candidates].copy_(chosen)
