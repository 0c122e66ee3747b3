"""`TorchEagle`: the drafter in rollouts of the PyTorch decoder, `EagleModel` over a paged cache of one layer.

Legend: T rows (pairs), S sequences, A those that draft, A' of them still drafting, H hidden size, V vocabulary,
K candidates, C candidates looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.errors import BackendError
from megatron_tlt.models.base import KVCache
from megatron_tlt.models.eagle.base import DraftParams, DraftRecorder, DraftRows, EagleInput, gaps_of
from megatron_tlt.models.eagle.model import EagleModel
from megatron_tlt.models.eagle.static_draft import CANDIDATES, RunStep, StaticDraft, StaticPairPlan
from megatron_tlt.models.inputs import DecoderInput, DecoderOutput
from megatron_tlt.models.keyed_noise import key_tensor, perturbed
from megatron_tlt.models.keys import row_keys
from megatron_tlt.models.torch.attention import AttentionPlan, Plan, paged_attention
from megatron_tlt.models.torch.decoder import TorchDecoder
from megatron_tlt.models.torch.paged import PagedPlan


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
    """See `eagle_base.EagleDecoder`. Cache layout: [2, (num_blocks + 1) * block_size, kv heads, D].

    As in the policy's, the block behind the last one is scratch. Position by position from Python: the chosen tokens
    come to the host at each, which decides what goes on.
    """

    kind = "torch"

    def __init__(self, policy: TorchDecoder, tp: TensorParallel | None = None):
        """`tp` is the policy's. Embedding and LM head are read from `policy` at every call."""
        self.config, self.device, self.dtype = policy.config, policy.device, policy.dtype
        self._policy = policy
        self._tp = tp if tp is not None and tp.size > 1 else None
        self.model = EagleModel(policy.config, tp).to(policy.device, policy.dtype).requires_grad_(False)
        self._loaded = False
        self._static: StaticDraft | None = None

    def use_graphs(self, kv: KVCache, run_step: RunStep, max_batch: int, max_context: int) -> None:
        """From now on drafts over `kv` run through `run_step(key, step)` (`GraphPool.run_step`) where they fit.

        `max_batch` chains of at most `max_context` positions, drafted ones included.
        """
        self._static = StaticDraft(self, kv, run_step, max_batch, max_context)

    @property
    def embed(self) -> Tensor:
        """The policy's embedding [V, H]."""
        return self._policy._embed

    def logits(self, hidden: Tensor) -> Tensor:
        """The policy's LM head on hidden states [T, H]: float32 [T, V] on every tensor-parallel rank."""
        local = linear(hidden, self._policy._head).float()
        return self._policy._shard.gather_logits(self._tp, local, self.config.vocab_size)

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Zeroed; its memory, one scratch block included, is taken at once."""
        shape = (2, (num_blocks + 1) * block_size, self.model.kv_heads, self.config.head_dim)
        return KVCache(num_blocks, block_size, torch.zeros(shape, dtype=self.dtype, device=self.device))

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block."""
        return 2 * block_size * self.model.kv_heads * self.config.head_dim * self.dtype.itemsize

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
        batch, model = inputs.batch, self.model
        positions, slots = batch.positions.long(), batch.slot_mapping.long()
        rope = model.rope(positions, int(batch.context_lens.max()))
        x = model.join(self.embed[batch.token_ids.long()], inputs.hidden)
        kv.data[0][slots], kv.data[1][slots] = model.keys_values(x, rope)
        plan = self._plan(inputs, kv.block_size)
        attended = paged_attention(model.queries(x, rope), kv.data[0], kv.data[1], plan)
        hidden = model.finish(x, attended)[batch.logit_rows.long()]
        return DecoderOutput(self.logits(hidden), hidden)

    def _plan(self, inputs: EagleInput, block_size: int) -> Plan:
        paged, kv_heads = self._policy.paged, self.model.kv_heads
        if paged is None:
            return PairPlan(inputs, block_size)
        heads = (kv_heads, self.model.heads // kv_heads)
        return PagedPlan(paged, inputs.batch, block_size, heads, first_visible=inputs.first_visible)

    def static_plan(self, batch: DecoderInput, first_visible: Tensor, block_size: int) -> Plan:
        """How one row each of some chains attends, captured or not; nothing comes to the host."""
        paged, kv_heads = self._policy.paged, self.model.kv_heads
        group = self.model.heads // kv_heads
        if paged is None:
            return StaticPairPlan(batch, first_visible, block_size, group)
        return PagedPlan(paged, batch, block_size, (kv_heads, group), 1, first_visible)

    @torch.inference_mode()
    def draft(self, inputs: EagleInput, params: DraftParams, kv: KVCache) -> DraftRows:
        """See `EagleDecoder.draft`. `max_len` may hold zeros: those sequences are fed only."""
        out = self.forward(inputs, kv)
        drafts = DraftRecorder(params, self.config.vocab_size)
        active = np.flatnonzero(params.max_len > 0)
        if not len(active):
            return drafts.result()
        chosen = torch.from_numpy(active).to(self.device)
        last, size = inputs.batch.logit_rows[chosen].long(), kv.block_size
        position = inputs.batch.positions[last].cpu().numpy()
        tables = inputs.batch.block_tables[chosen]
        host_tables = tables.cpu().numpy()
        keys, first = params.keys[active], params.output_positions[active]
        temperature = torch.from_numpy(params.temperature[active]).to(self.device)
        logits, at = out.logits[chosen], np.arange(len(active))
        tokens, scores = self._best(
            perturbed(logits, key_tensor(row_keys(keys, first), self.device), temperature)
        )
        longest = int((position + params.max_len[active]).max())
        feed = self._feed(kv, len(active), longest)
        feed.begin(tables, inputs.first_visible[chosen], temperature, out.hidden[chosen], longest)
        for step in range(int(params.max_len.max())):
            going = drafts.take(step, active[at], tokens, gaps_of(scores), logits)
            at, token = at[going], tokens[going, 0]
            if not len(at):
                break
            place = position[at] + step + 1
            slots = host_tables[at, place // size] * size + place % size
            noise = row_keys(keys[at], first[at] + step + 1)
            tokens, scores, logits = feed.step(at, token, place, slots, noise)
        return drafts.result()

    def _feed(self, kv: KVCache, chains: int, longest: int) -> StaticDraft | _EagerDraft:
        static = self._static
        if static is not None and static.kv is kv and static.fits(chains, longest + 1):
            return static
        return _EagerDraft(self, kv)

    def _best(self, scores: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 and scores float32 of the best candidates, [A', C] each, of [A', V]."""
        best, token = scores.topk(min(CANDIDATES, scores.shape[1]), dim=-1)
        return self.to_host(torch.stack([best.double(), token.double()]))

    def to_host(self, found: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and scores of `found` float64 [scores; tokens]; those of rank 0, so that ranks never part."""
        if self._tp is not None:
            self._tp.broadcast(found)
        scores, tokens = found.cpu().numpy()
        return tokens.astype(np.int32), scores.astype(np.float32)


class _EagerDraft:
    """The steps of one draft as ordinary forwards of the chains that go on; see `StaticDraft`."""

    def __init__(self, eagle: TorchEagle, kv: KVCache):
        self._eagle, self._kv = eagle, kv

    def begin(
        self, tables: Tensor, first_visible: Tensor, temperature: Tensor, hidden: Tensor, longest: int
    ) -> None:
        """See `StaticDraft.begin`."""
        self._tables, self._first, self._temperature = tables, first_visible, temperature
        self._hidden = hidden

    def step(
        self, at: np.ndarray, tokens: np.ndarray, positions: np.ndarray, slots: np.ndarray, keys: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Tensor]:
        """See `StaticDraft.step`."""
        device = self._eagle.device
        index = torch.from_numpy(at).to(device)
        starts = np.arange(len(at) + 1)
        arrays = (tokens, positions, slots, starts, positions + 1)
        tensors = [torch.from_numpy(a.astype(np.int32)).to(device) for a in arrays]
        fed = DecoderInput.of([*tensors, self._tables[index], tensors[3][:-1]])
        out = self._eagle.forward(EagleInput(fed, self._hidden[index], self._first[index]), self._kv)
        self._hidden[index] = out.hidden
        scores = perturbed(out.logits, key_tensor(keys, device), self._temperature[index])
        return *self._eagle._best(scores), out.logits
