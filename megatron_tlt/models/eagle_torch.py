"""`TorchEagle`: the drafter in rollouts of the PyTorch decoder, `EagleModel` over a paged cache of one layer.

Legend: T rows (pairs), S sequences, A of them still drafting, H hidden size, V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.errors import BackendError
from megatron_tlt.models.attention import AttentionPlan, paged_attention
from megatron_tlt.models.base import KVCache
from megatron_tlt.models.decoder import TorchDecoder
from megatron_tlt.models.eagle import EagleModel
from megatron_tlt.models.eagle_base import BUCKET_WIDTH, BUCKETS, DEPTHS, DraftParams, DraftRows, EagleInput
from megatron_tlt.models.inputs import DecoderInput, DecoderOutput
from megatron_tlt.models.keyed_noise import gumbel_noise, row_keys


class PairPlan(AttentionPlan):
    """As its base, but a row sees no pair before its sequence's first visible one."""

    def __init__(self, inputs: EagleInput, block_size: int):
        batch = inputs.batch
        super().__init__(batch, block_size)
        counts = (batch.query_start[1:] - batch.query_start[:-1]).long()
        first = torch.repeat_interleave(inputs.first_visible.long(), counts)  # [T]
        for i, (rows, sequences, slots, mask) in enumerate(self.calls):
            at = torch.arange(slots.shape[1], device=slots.device)
            seen = at >= first[rows].view(sequences, 1, -1, 1)
            self.calls[i] = (rows, sequences, slots, mask & seen)


class TorchEagle:
    """See `eagle_base.EagleDecoder`. Cache layout: [2, num_blocks * block_size, kv heads, D].

    Draft-position by draft-position from Python: on CUDA the chosen tokens come to the host at each.
    """

    kind = "torch"

    def __init__(self, policy: TorchDecoder, tp: TensorParallel | None = None):
        """`tp` is the policy's. Embedding and LM head are read from `policy` at every call."""
        self.dtype, self._policy = policy.dtype, policy
        self._tp = tp if tp is not None and tp.size > 1 else None
        self.model = EagleModel(policy.config, tp).to(policy.device, policy.dtype).requires_grad_(False)
        self._loaded = False

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Zeroed; its memory is taken at once."""
        shape = (2, num_blocks * block_size, self.model.kv_heads, self._policy.config.head_dim)
        data = torch.zeros(shape, dtype=self.dtype, device=self._policy.device)
        return KVCache(num_blocks, block_size, data)

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block."""
        return 2 * block_size * self.model.kv_heads * self._policy.config.head_dim * self.dtype.itemsize

    def copy_blocks(self, kv: KVCache, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copies block src[i] to dst[i], in order of i."""
        blocks = kv.data.unflatten(1, (-1, kv.block_size))
        for a, b in zip(src, dst, strict=True):
            blocks[:, b] = blocks[:, a]

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Takes full tensors. Raises CheckpointError unless they are all of `eagle_parameter_shapes`."""
        self.model.load_full(named)
        self._loaded = True

    @torch.inference_mode()
    def forward(self, inputs: EagleInput, kv: KVCache) -> DecoderOutput:
        """See `EagleDecoder.forward`. Raises BackendError before weights were loaded."""
        if not self._loaded:
            raise BackendError("the drafter was asked before its weights were loaded")
        batch, model, policy = inputs.batch, self.model, self._policy
        positions, slots = batch.positions.long(), batch.slot_mapping.long()
        rope = model.rope(positions, int(batch.context_lens.max()))
        x = model.join(policy._embed[batch.token_ids.long()], inputs.hidden)
        kv.data[0][slots], kv.data[1][slots] = model.keys_values(x, rope)
        plan = PairPlan(inputs, kv.block_size)
        attended = paged_attention(model.queries(x, rope), kv.data[0], kv.data[1], plan)
        hidden = model.finish(x, attended)[batch.logit_rows.long()]
        local = linear(hidden, policy._head).float()
        logits = policy._shard.gather_logits(self._tp, local, policy.config.vocab_size)
        return DecoderOutput(logits, hidden)

    @torch.inference_mode()
    def draft(self, inputs: EagleInput, params: DraftParams, kv: KVCache) -> DraftRows:
        """See `EagleDecoder.draft`. `max_len` may hold zeros: those sequences are fed only."""
        out = self.forward(inputs, kv)
        batch, last = inputs.batch, inputs.batch.logit_rows.long()
        drafts = _Drafts(params, out.logits.shape[1])
        active = np.flatnonzero(params.max_len > 0)
        logits, hidden = self._rows(out.logits, active), self._rows(out.hidden, active)
        position = batch.positions[last].cpu().numpy()[active]
        tables = batch.block_tables.cpu().numpy()
        for step in range(int(params.max_len.max(initial=0))):
            tokens, scores = self._candidates(logits, params, active, step)
            going = drafts.take(step, active, tokens, scores, logits)
            active, position = active[going], position[going] + 1
            if not len(active):
                break
            fed = self._single_rows(tokens[going, 0], position, tables[active], kv.block_size)
            first = self._rows(inputs.first_visible, active)
            hidden = self._rows(hidden, np.flatnonzero(going))
            out = self.forward(EagleInput(fed, hidden, first), kv)
            logits, hidden = out.logits, out.hidden
        return drafts.result()

    def _candidates(
        self, logits: Tensor, params: DraftParams, active: np.ndarray, step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 and scores float32 of the best, [A, max(K, 2)] each; the same on all tensor-parallel ranks."""
        keys = row_keys(params.keys[active], params.output_positions[active] + step)
        temperature = torch.from_numpy(params.temperature[active]).to(logits.device)[:, None]
        warm = temperature > 0
        scores = logits / torch.where(warm, temperature, 1.0)
        scores = scores + torch.where(warm, gumbel_noise(keys, logits.shape[1], logits.device), 0.0)
        best, token = scores.topk(min(max(params.topk, 2), logits.shape[1]), dim=-1)
        found = torch.stack([best.double(), token.double()])
        if self._tp is not None:
            self._tp.broadcast(found)
        scored, chosen = found.cpu().numpy()
        return chosen.astype(np.int32), scored.astype(np.float32)

    def _single_rows(
        self, tokens: np.ndarray, position: np.ndarray, tables: np.ndarray, size: int
    ) -> DecoderInput:
        """One pair of each of A sequences, at `position`."""
        count = len(tokens)
        slots = tables[np.arange(count), position // size] * size + position % size
        starts = np.arange(count + 1)
        arrays = (tokens, position, slots, starts, position + 1, tables, starts[:-1])
        device = self._policy.device
        return DecoderInput.of([torch.from_numpy(a.astype(np.int32)).to(device) for a in arrays])

    def _rows(self, tensor: Tensor, index: np.ndarray) -> Tensor:
        if len(index) == tensor.shape[0]:
            return tensor
        return tensor[torch.from_numpy(index).to(tensor.device)]


class _Drafts:
    """Fills a `DraftRows`, draft position by draft position."""

    def __init__(self, params: DraftParams, vocab: int):
        count, longest = len(params.keys), int(params.max_len.max(initial=0))
        self._params, self._survival = params, np.ones(count, np.float32)
        self._out = DraftRows(
            np.zeros(count, np.int32),
            np.zeros((count, longest, params.topk), np.int32),
            np.zeros((count, longest, params.topk), np.float32),
            np.zeros((count, longest), np.float32),
            np.zeros((count, longest, vocab), np.float32) if params.want_logits else None,
        )

    def take(
        self, step: int, active: np.ndarray, tokens: np.ndarray, scores: np.ndarray, logits: Tensor
    ) -> np.ndarray:
        """Notes the candidates of position `step`; bool [A]: which chains go on behind it."""
        params, out, k = self._params, self._out, self._params.topk
        gaps = scores[:, :1] - scores[:, 1:]
        bucket = np.minimum(gaps[:, 0] / BUCKET_WIDTH, BUCKETS - 1).astype(np.int64)
        self._survival[active] *= params.rates[min(step, DEPTHS - 1), bucket]
        kept = self._survival[active] >= params.min_survival
        rows = active[kept]
        out.lengths[rows] = step + 1
        out.tokens[rows, step] = tokens[kept, :k]
        out.gaps[rows, step, 0] = gaps[kept, 0]
        out.gaps[rows, step, 1:] = gaps[kept, : k - 1]
        out.survival[rows, step] = self._survival[rows]
        if out.logits is not None:
            out.logits[rows, step] = logits.float().cpu().numpy()[kept]
        going: np.ndarray = kept & (params.max_len[active] > step + 1)
        return going

    def result(self) -> DraftRows:
        """The drafts."""
        return self._out
