"""Forward and backward of packed micro-batches through megatron's schedules (no pipelining, or 1F1B).

Legend: N response rows of a micro-batch, V vocabulary columns of this TP rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_tlt.actor.build import PolicyModel
from megatron_tlt.actor.compat import cpu_as_cuda
from megatron_tlt.actor.context_parallel import whole_responses
from megatron_tlt.actor.logprob import VocabShard, token_statistics
from megatron_tlt.actor.microbatch import MicroBatch
from megatron_tlt.actor.recompute import no_recomputed_norms
from megatron_tlt.algorithms.base import LossInputs

# isort: split
# megatron comes after compat.
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

Metrics = dict[str, Tensor]


class PolicyLoss(Protocol):
    """The part of an algorithm that the update needs."""

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss *sum* over the micro-batch's tokens (0-d, differentiable), and sums for the metrics.

        A metric whose name ends in `_max` is a maximum. Mutates nothing.
        """


class Scored(NamedTuple):
    """A micro-batch with [N] log-probs of its response tokens, where the loss needs them (last stage only)."""

    batch: MicroBatch
    old: Tensor | None = None
    reference: Tensor | None = None


def accumulate_gradients(
    model: PolicyModel,
    ddp: Any,
    batches: Sequence[Scored],
    loss: PolicyLoss,
    denominator: float,
    temperature: float,
) -> list[Metrics]:
    """Adds the gradient of sum(loss) / denominator over these micro-batches and all replicas. Collective.

    Replicas may bring different numbers of micro-batches, but at least one each. Mutates the gradient buffers, which
    must be zero before. Returns metrics per micro-batch on the last stage, an empty list elsewhere. With deterministic
    algorithms (`train.deterministic`) an operation that has none raises RuntimeError with its name.
    """

    def finish(scored: Scored, logits: Tensor) -> tuple[Tensor, Tensor, Metrics]:
        value, metrics = _loss_of(model, scored, logits, loss, temperature)
        # Divided here, so megatron must not divide again: it does so only for a positive token count.
        return value / denominator, torch.zeros((), dtype=torch.int), metrics

    with _no_nondeterministic_form():
        return _run(model, ddp, batches, finish, forward_only=False)


@contextmanager
def _no_nondeterministic_form() -> Iterator[None]:
    """Inside, deterministic algorithms raise where they would warn. Where they may warn, PyTorch's fused attention adds
    gradients of queries on CUDA by atomic operations, in any order.
    """
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error" if mode else "default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def forward_logprobs(model: PolicyModel, batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
    """[N] fp32 log-probs of the response tokens per micro-batch on the last stage, an empty list elsewhere.

    Collective over the replica. Mutates nothing.
    """

    def finish(scored: Scored, logits: Tensor) -> Tensor:
        return _statistics(model, scored.batch, logits, temperature, with_entropy=False)[0]

    with torch.no_grad(), no_recomputed_norms(model.module):
        wrapped = [Scored(batch) for batch in batches]
        return _run(model, model.module, wrapped, finish, forward_only=True) if batches else []


def _statistics(
    model: PolicyModel, batch: MicroBatch, logits: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies [N] of all response rows, from the logits of those here, [1, N of this rank, V], and of
    padding behind them. Collective over the context parallel group.
    """
    labels = batch.labels if batch.own is None else batch.labels[batch.own]
    padded = F.pad(labels, (0, logits.shape[1] - len(labels)))
    logprobs, entropy = token_statistics(logits.squeeze(0), padded, vocab_shard(model), temperature, with_entropy)
    found = [values[: len(labels)] for values in (logprobs, entropy) if values is not None]
    if batch.own is not None:
        found = [*whole_responses(torch.stack(found), batch.own, len(batch.labels), model.groups.cp)]
    return found[0], found[1] if with_entropy else None


def vocab_shard(model: PolicyModel) -> VocabShard:
    """This rank's columns of the vocabulary."""
    groups, tp = model.groups, model.groups.dims.tp
    return VocabShard.of_rank(model.config.vocab_size, groups.at.tp, tp, groups.tp if tp > 1 else None)


def _run(
    model: PolicyModel,
    wrapped: Any,
    batches: Sequence[Scored],
    finish: Callable[[Scored, Tensor], Any],
    forward_only: bool,
) -> list[Any]:
    """One pass of megatron's schedule. `finish(scored, logits)` runs on the last stage."""

    def step(iterator: Iterator[Scored], module: Any) -> tuple[Tensor, Callable[..., Any]]:
        scored = next(iterator)
        output = model.forward(module, scored.batch)
        return output, lambda logits, non_loss_data=False: finish(scored, logits)

    with cpu_as_cuda():
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=[wrapped],
            num_microbatches=len(batches),
            # Only a default: with variable_seq_lengths the stages exchange the real one.
            seq_length=batches[0].batch.input_ids.shape[1],
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


def _loss_of(
    model: PolicyModel, scored: Scored, logits: Tensor, loss: PolicyLoss, temperature: float
) -> tuple[Tensor, Metrics]:
    """Loss sum and metric sums of one micro-batch, from its logits, the same on its context parallel ranks."""
    batch = scored.batch
    logprobs, entropy = _statistics(model, batch, logits, temperature, with_entropy=True)
    if batch.is_filler:
        return (logprobs * 0.0).sum(), {}
    assert entropy is not None
    mask = batch.response_array("loss_mask")
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=scored.old,
        rollout_logprobs=batch.rollout_logprobs(),
        ref_logprobs=scored.reference,
        entropy=entropy,
        advantages=batch.response_array("advantages"),
        mask=mask,
        weights=batch.weights(),
        segments=batch.segments,
        num_segments=len(batch.members),
    )
    value, sums = loss.loss(inputs)
    metrics = {
        "loss": value.detach(),
        "entropy": torch.where(mask > 0, entropy.detach(), 0.0).sum(),
        "tokens": mask.sum(),
        "micro_batches": torch.ones((), device=logits.device),
        **{name: sum_.detach() for name, sum_ in sums.items()},
    }
    return value, metrics
