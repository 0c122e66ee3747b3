"""Token log-probs and entropy against the textbook: values, gradients, chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_tlt.actor import logprob
from megatron_tlt.actor.logprob import VocabShard, token_statistics


def textbook(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    table = (logits.double() / temperature).log_softmax(-1)
    return table.gather(1, labels[:, None])[:, 0], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 64, 1 << 20])
def test_equals_the_textbook(temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logprob.CHUNK_ELEMENTS, "cpu", chunk)
    torch.manual_seed(0)
    logits = (torch.randn(11, 23) * 4).requires_grad_()
    labels = torch.randint(0, 23, (11,))
    weights = torch.randn(2, 11)
    shard = VocabShard.of_rank(23, 0, 1, None)
    found = token_statistics(logits, labels, shard, temperature, with_entropy=True)
    wanted = textbook(logits, labels, temperature)
    for got, want in zip(found, wanted, strict=True):
        assert got is not None
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    assert found[1] is not None
    (gradient,) = torch.autograd.grad((found[0] * weights[0] + found[1] * weights[1]).sum(), logits)
    (expected,) = torch.autograd.grad((wanted[0] * weights[0] + wanted[1] * weights[1]).sum(), logits)
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-5)


def test_bf16_logits_lose_nothing_but_their_own_rounding() -> None:
    torch.manual_seed(2)
    logits = torch.randn(6, 50).bfloat16()
    labels = torch.randint(0, 50, (6,))
    found = token_statistics(logits, labels, VocabShard.of_rank(50, 0, 1, None), 1.0, with_entropy=False)[0]
    torch.testing.assert_close(found.double(), textbook(logits, labels, 1.0)[0], atol=1e-5, rtol=1e-5)
