"""The drafter's loss against a loop over tokens, and its hand-made gradient against autograd."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_tlt.config.drafter import DrafterLossSection
from megatron_tlt.drafter import loss as module
from megatron_tlt.drafter.batching import DraftSequence, collate
from megatron_tlt.drafter.loss import eagle_loss
from megatron_tlt.models.eagle.pairs import PairLayout
from tests.helpers.tiny_drafters import FAMILIES, lookup_tables, random_sequence

CONFIG = FAMILIES["qwen3"]
STEPS = 3
SEQUENCES = [random_sequence(CONFIG, n, p, seed=p) for n, p in ((9, 4), (4, 1), (14, 2), (6, 4))]
CASES = [
    (DrafterLossSection(), 1.0),
    (DrafterLossSection(hidden_weight=0.3, ce_weight=0.7, tv_weight=0.2, step_decay=0.5), 0.6),
    (DrafterLossSection(kind="lk", hidden_weight=0.5), 1.3),
]


def drafted(sequences: list[DraftSequence]) -> list[torch.Tensor]:
    """Made-up outputs of every step at every base; those of one sequence do not depend on the others."""
    parts = []
    for s in sequences:
        generator = torch.Generator().manual_seed(s.length)
        parts.append(torch.randn(STEPS, s.num_bases, CONFIG.hidden_size, generator=generator))
    return [t.clone().requires_grad_() for t in torch.cat(parts, 1)]


def token_by_token(
    sequences: list[DraftSequence], head: torch.Tensor, w: DrafterLossSection, t: float
) -> tuple[torch.Tensor, list]:
    """The docstring's formula, one (base, step) at a time."""
    outputs = drafted(sequences)
    total = torch.zeros(())
    for step, output in enumerate(outputs):
        terms, row = [], 0
        for s in sequences:
            for base in range(s.first_base, s.length - 1):
                place = base + step
                if place <= s.length - 2:  # token place + 1 exists
                    terms.append(one_token(output[row], s.hidden[place], head, w, t))
                row += 1
        total = total + w.step_decay**step * torch.stack(terms).mean()
    return total, outputs


def one_token(o, h, head: torch.Tensor, w: DrafterLossSection, t: float) -> torch.Tensor:
    p, log_q = (head @ h / t).softmax(0), (head @ o / t).log_softmax(0)
    near = torch.where((o - h).abs() < 1, 0.5 * (o - h) ** 2, (o - h).abs() - 0.5).mean()
    ce, tv = -(p * log_q).sum(), 0.5 * (p - log_q.exp()).abs().sum()
    if w.kind == "mix":
        return w.hidden_weight * near + w.ce_weight * ce + w.tv_weight * tv
    kl = ce + (p * p.log()).sum()
    share = math.exp(-3 * (1 - float(tv.detach())))
    return w.hidden_weight * near + share * kl + (1 - share) * tv


@pytest.mark.parametrize(("weights", "t"), CASES, ids=["mix", "mix-cold", "lk"])
@pytest.mark.parametrize("at_once", [1 << 25, 300], ids=["whole", "blocks"])
def test_loss_and_gradients_equal_a_loop_over_tokens(monkeypatch, weights, t: float, at_once: int) -> None:
    monkeypatch.setattr(module, "_MAX_ELEMENTS", at_once)
    _, head = lookup_tables(CONFIG)
    batch = collate(SEQUENCES)
    outputs = drafted(SEQUENCES)
    got, _ = eagle_loss(outputs, batch, PairLayout(batch), head, weights, t)
    want, theirs = token_by_token(SEQUENCES, head, weights, t)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    (2.0 * got).backward()
    (2.0 * want).backward()
    for a, b in zip(outputs, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4)
