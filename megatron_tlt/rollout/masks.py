"""Top-k, top-p and min-p, per row, with the arithmetic of Hugging Face's warpers (transformers 5).

Order: temperature, top-k, top-p, min-p. Ties: every token equal to the k-th largest survives top-k. Top-p
keeps a token unless the tokens up to it, in ascending order, weigh `<= 1 - p`; among equal logits the higher
id counts as the larger, so it is the last to go (a stable ascending sort: what transformers does on CPU).
Min-p keeps tokens with probability `>= min_p * max`. The most likely token always survives.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")


def apply_masks(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Sets tokens outside the masks to -inf.

    `scores` [R, V] float32, already divided by the temperature; `top_k` [R] int (0: off), `top_p` [R] float64
    (1: off), `min_p` [R] float32 (0: off), on the device of `scores`. Returns a new tensor [R, V].
    """
    if bool((top_k > 0).any()):
        scores = _mask_top_k(scores, top_k)
    if bool((top_p < 1).any()):
        scores = _mask_top_p(scores, top_p)
    if bool((min_p > 0).any()):
        scores = _mask_min_p(scores, min_p)
    return scores


def _mask_top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    vocab = scores.shape[1]
    wanted = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).long()
    limited = int(torch.where(wanted < vocab, wanted, 1).max())
    largest = scores.topk(limited, dim=-1).values
    threshold = largest.gather(1, (wanted.clamp(max=limited) - 1).unsqueeze(1))
    drop = (scores < threshold) & (wanted < vocab).unsqueeze(1)
    return scores.masked_fill(drop, NEG_INF)


def _mask_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    ascending, order = torch.sort(scores, dim=-1, descending=False, stable=True)
    weight = ascending.softmax(dim=-1).cumsum(dim=-1)
    # 1 - p in double, rounded once, as in transformers, where p is a Python float.
    bound = (1 - top_p).float().unsqueeze(1)
    drop = (weight <= bound) & (top_p < 1).unsqueeze(1)
    drop[:, -1] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter_(1, order, drop), NEG_INF)


def _mask_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    probs = torch.softmax(scores, dim=-1)
    top, best = probs.max(dim=-1, keepdim=True)
    drop = probs < min_p.unsqueeze(1) * top
    drop.scatter_(1, best, False)
    return scores.masked_fill(drop, NEG_INF)
