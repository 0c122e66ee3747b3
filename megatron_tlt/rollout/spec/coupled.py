"""Coupled verification of logits: keyed draws, then `verify.follow`. `models/csrc/fused.c` does the same in a step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.rollout.sampler import Sampler, SamplingRows
from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.verify import Accepted, follow


def coupled(
    logits: Tensor, rows: SamplingRows, draft: Draft, sampler: Sampler, tp: TensorParallel
) -> tuple[Accepted, np.ndarray, np.ndarray]:
    """Draws the policy's keyed token at every node and follows the children that match (DESIGN decision 2).

    `logits` [T, V] of T = B + N rows. Returns the verdict, the emitted tokens int32 and their log-probabilities.
    """
    tokens, logprobs = sampler.sample(logits, rows)
    if tp.size > 1:  # ranks may round differently: rank 0 decides
        both = tp.broadcast(torch.stack((tokens, logprobs.view(torch.int32))))
        tokens, logprobs = both[0], both[1].view(torch.float32)
    drawn, scores = tokens.cpu().numpy(), logprobs.cpu().numpy()
    accepted = follow(drawn, draft)
    return accepted, drawn[accepted.index], scores[accepted.index]
