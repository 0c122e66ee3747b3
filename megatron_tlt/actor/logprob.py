"""Token log-probs and entropies from vocabulary-parallel logits: exact in fp32, with no fp32 copy of them.

Legend: R rows, V columns of this TP rank (the last ranks' may include padding), x = logits / temperature.

    logprob = x[label] - log Z          d logprob / dx = onehot(label) - p
    entropy = log Z - sum(p x)          d entropy / dx = -p (log p + entropy)

Both passes go over the rows in chunks, so the fp32 working set is one chunk, whatever the type of the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tlt.config.planning.activations import CHUNK_ELEMENTS


@dataclass(frozen=True)
class VocabShard:
    """The vocabulary columns of one TP rank: the first token id, and how many columns are no padding."""

    start: int
    valid: int
    group: dist.ProcessGroup | None  # None: the vocabulary is whole

    @classmethod
    def of_rank(cls, vocab_size: int, tp_rank: int, tp_size: int, group: dist.ProcessGroup | None) -> VocabShard:
        """Shard of a vocabulary padded to a multiple of the TP size."""
        width = -(-vocab_size // tp_size)
        start = tp_rank * width
        return cls(start, max(0, min(width, vocab_size - start)), group)


def token_statistics(
    logits: Tensor, labels: Tensor, shard: VocabShard, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature)[label] and, `with_entropy`, the entropy of each row.

    Both [R] fp32, differentiable. `logits` is [R, V] of any float type, `labels` [R] int64 global token ids.
    Collective over the shard's group.
    """
    assert temperature > 0
    logprobs, entropy = _TokenStatistics.apply(logits, labels, shard, temperature, with_entropy)
    return logprobs, (entropy if with_entropy else None)


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, shard: VocabShard, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        rows = logits.shape[0]
        top = _row_maximum(logits, shard, temperature)
        # Per row: sum exp(x - top); sum exp(x - top) (x - top); x[label] - top (0 where another rank owns it).
        sums = torch.zeros(3, rows, dtype=torch.float32, device=logits.device)
        local, owned = _local_labels(labels, shard)
        for part in _chunks(logits):
            if shard.valid == 0:
                break
            x = _scaled(logits[part], shard, temperature).sub_(top[part, None])
            picked = x.gather(1, local[part, None]).squeeze(1)
            sums[2, part] = torch.where(owned[part], picked, 0.0)
            e = x.exp()
            sums[0, part] = e.sum(-1)
            if with_entropy:
                sums[1, part] = e.mul_(x).sum(-1)
        if shard.group is not None:
            dist.all_reduce(sums, group=shard.group)
        log_z = sums[0].log()
        logprobs = sums[2] - log_z
        entropy = log_z - sums[1] / sums[0]
        ctx.shard, ctx.temperature = shard, temperature
        ctx.save_for_backward(logits, local, owned, top + log_z, entropy)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprob, grad_entropy = grads
        logits, local, owned, log_z, entropy = ctx.saved_tensors
        shard, temperature = ctx.shard, ctx.temperature
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(log_z)
        out = torch.zeros_like(logits) if shard.valid < logits.shape[1] else torch.empty_like(logits)
        for part in _chunks(logits):
            if shard.valid == 0:
                break
            x = _scaled(logits[part], shard, temperature).sub_(log_z[part, None])  # log p
            p = x.exp()
            factor = grad_logprob[part, None]
            if grad_entropy is not None:
                factor = x.add_(entropy[part, None]).mul_(grad_entropy[part, None]) + factor
            g = p.mul_(-factor)
            at_label = torch.where(owned[part], grad_logprob[part], 0.0)
            g.scatter_add_(1, local[part, None], at_label[:, None])
            out[part, : shard.valid] = g.div_(temperature) if temperature != 1.0 else g
        return out, None, None, None, None


def _row_maximum(logits: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    if shard.valid:
        top = logits[:, : shard.valid].amax(-1).float() / temperature
    else:
        top = torch.full((logits.shape[0],), float("-inf"), device=logits.device)
    if shard.group is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=shard.group)
    return top


def _local_labels(labels: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Column of each label on this rank (0 where another rank owns it) and whether this rank owns it."""
    local = labels - shard.start
    owned = (local >= 0) & (local < shard.valid)
    return torch.where(owned, local, 0), owned


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK_ELEMENTS.get(logits.device.type, 1 << 22) // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], rows):
        yield slice(start, min(start + rows, logits.shape[0]))


def _scaled(chunk: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """fp32 copy of a chunk's valid columns, divided by the temperature (always fresh memory)."""
    x = chunk[:, : shard.valid].to(torch.float32, copy=True)
    return x.div_(temperature) if temperature != 1.0 else x
