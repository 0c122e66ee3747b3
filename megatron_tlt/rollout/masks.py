"""Top-k, top-p and min-p, per row, with the arithmetic of Hugging Face's warpers (transformers 5).

Order: temperature, top-k, top-p, min-p. Ties: every token equal to the k-th largest survives top-k. Top-p
keeps a token unless the tokens up to it, in ascending order, weigh `<= 1 - p`; among equal logits the higher
id counts as the larger, so it is the last to go (a stable ascending sort, as in transformers on CPU).
Min-p keeps tokens with probability `>= min_p * max`. The most likely token always survives.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NEG_INF = float("-inf")


def apply_masks(scores: Tensor, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> Tensor:
    """Sets tokens outside the masks to -inf; returns a new tensor [R, V].

    `scores` [R, V] float32, already divided by the temperature; `top_k` [R] int (0: off), `top_p` [R] float64
    (1: off) and `min_p` [R] float32 (0: off) are numpy arrays, so that choosing the masks needs no synchronisation with
    the device.
    """
    if (top_k > 0).any():
        scores = _mask_top_k(scores, top_k)
    if (top_p < 1).any():
        scores = _mask_top_p(scores, top_p)
    if (min_p > 0).any():
        scores = _mask_min_p(scores, min_p)
    return scores


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    """[R] on the host to [R, 1] on the device of `like`."""
    return torch.from_numpy(values).to(like.device).unsqueeze(1)


def _mask_top_k(scores: Tensor, top_k: np.ndarray) -> Tensor:
    vocab = scores.shape[1]
    is_on = (top_k > 0) & (top_k < vocab)
    wanted = np.where(is_on, top_k, 1).astype(np.int64)
    largest = scores.topk(int(wanted.max()), dim=-1).values
    threshold = largest.gather(1, _column(wanted - 1, scores))
    return scores.masked_fill((scores < threshold) & _column(is_on, scores), NEG_INF)


def _mask_top_p(scores: Tensor, top_p: np.ndarray) -> Tensor:
    ascending, order = torch.sort(scores, dim=-1, descending=False, stable=True)
    weight = ascending.softmax(dim=-1).cumsum(dim=-1)
    # 1 - p in double, rounded once, as in transformers, where p is a Python float.
    drop = (weight <= _column((1 - top_p).astype(np.float32), scores)) & _column(top_p < 1, scores)
    drop[:, -1] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter_(1, order, drop), NEG_INF)


def _mask_min_p(scores: Tensor, min_p: np.ndarray) -> Tensor:
    probs = torch.softmax(scores, dim=-1)
    top, best = probs.max(dim=-1, keepdim=True)
    drop = probs < _column(min_p, scores) * top
    drop.scatter_(1, best, False)
    return scores.masked_fill(drop, NEG_INF)
