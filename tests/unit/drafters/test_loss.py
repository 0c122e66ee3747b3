"""The drafter's loss against a loop over tokens, and its hand-made gradient against autograd."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.config.drafter import LossWeights
from megatron_tlt.drafters import loss as module
from megatron_tlt.drafters.eagle.config import Eagle3Config, EagleConfig
from megatron_tlt.drafters.eagle.loss import draft_loss
from megatron_tlt.drafters.eagle.model import EagleModel
from megatron_tlt.drafters.eagle.pairs import PairLayout
from megatron_tlt.drafters.eagle3.model import Eagle3Model
from megatron_tlt.drafters.loss import LossInputs
from megatron_tlt.drafters.training.batching import DraftSequence, collate
from tests.helpers.tiny_drafters import DEEP, FAMILIES, lookup_tables, random_drafter, random_sequence

CONFIG = FAMILIES["qwen3"]
STEPS = 3
SEQUENCES = [random_sequence(CONFIG, n, p, seed=p) for n, p in ((9, 4), (4, 1), (14, 2), (6, 4))]
CASES = [
    (LossWeights(), 1.0),
    (LossWeights(hidden_weight=0.3, ce_weight=0.7, tv_weight=0.2, step_decay=0.5), 0.6),
]


def drafted(sequences: list[DraftSequence]) -> list[torch.Tensor]:
    """Made-up outputs of every step at every base; those of one sequence do not depend on the others."""
    parts = []
    for s in sequences:
        generator = torch.Generator().manual_seed(s.length)
        parts.append(torch.randn(STEPS, s.num_bases, CONFIG.hidden_size, generator=generator))
    return [t.clone().requires_grad_() for t in torch.cat(parts, 1)]


def token_by_token(
    sequences: list[DraftSequence], head: torch.Tensor, w: LossWeights, t: float
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


def one_token(o, h, head: torch.Tensor, w: LossWeights, t: float) -> torch.Tensor:
    near = torch.where((o - h).abs() < 1, 0.5 * (o - h) ** 2, (o - h).abs() - 0.5).mean()
    return w.hidden_weight * near + one_row((head @ h / t).softmax(0), (head @ o / t).log_softmax(0), w)


def one_row(p, log_q, w: LossWeights) -> torch.Tensor:
    ce, tv = -(p * log_q).sum(), 0.5 * (p - log_q.exp()).abs().sum()
    return w.ce_weight * ce + w.tv_weight * tv


@pytest.mark.parametrize(("weights", "t"), CASES, ids=["default", "cold"])
@pytest.mark.parametrize("at_once", [1 << 25, 300], ids=["whole", "blocks"])
def test_loss_and_gradients_equal_a_loop_over_tokens(monkeypatch, weights, t: float, at_once: int) -> None:
    monkeypatch.setattr(module, "_MAX_ELEMENTS", at_once)
    _, head = lookup_tables(CONFIG)
    batch = collate(SEQUENCES)
    outputs = drafted(SEQUENCES)
    got, _ = draft_loss(
        EagleModel(EagleConfig.of(CONFIG)),
        outputs,
        PairLayout(batch),
        LossInputs(batch, head, head, STEPS, weights, t),
    )
    want, theirs = token_by_token(SEQUENCES, head, weights, t)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    (2.0 * got).backward()
    (2.0 * want).backward()
    for a, b in zip(outputs, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("size", [60, 101], ids=["reduced", "whole"])
@pytest.mark.parametrize(("weights", "t"), CASES, ids=["default", "cold"])
def test_eagle3_is_taught_over_its_own_vocabulary(monkeypatch, weights, t: float, size: int) -> None:
    """Norm and head are trained, too; rows whose drawn token is unknown teach nothing and count as not accepted."""
    monkeypatch.setattr(module, "_MAX_ELEMENTS", 700)
    config = Eagle3Config.of(DEEP["qwen3"], draft_vocab_size=size)
    embed, head = lookup_tables(config.policy)
    model = Eagle3Model(config)
    model.load_full(random_drafter(config).items())
    sequences = [random_sequence(config, n, p, seed=n) for n, p in ((12, 5), (3, 1), (17, 9))]
    batch = collate(sequences)
    layout = PairLayout(batch)
    got, parts = draft_loss(
        model,
        model.unroll(embed, batch, layout, STEPS),
        layout,
        LossInputs(batch, embed, head, STEPS, weights, t),
    )
    assert set(parts) == {"ce", "accept"}
    got.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()

    ids = model.token_ids() if config.reduced else torch.arange(size)
    want, unknown = torch.zeros(()), 0
    for step, output in enumerate(model.unroll(embed, batch, layout, STEPS)):
        terms, accepts, row = [], [], 0
        for s in sequences:
            for base in range(s.first_base, s.length - 1):
                if base + step <= s.length - 2:
                    p = torch.softmax(head @ s.hidden[base + step, -64:] / t, 0)
                    log_q = (model.full_logits(output[row])[ids] / t).log_softmax(0)
                    p = p[ids] / p[ids].sum()
                    is_known = int(s.token_ids[base + step + 1]) in ids.tolist()
                    unknown += not is_known
                    accepts.append(torch.minimum(p, log_q.exp()).sum().detach() * is_known)
                    terms.append(one_row(p, log_q, weights) * is_known)
                row += 1
        want = want + weights.step_decay**step * torch.stack(terms).mean()
        torch.testing.assert_close(parts["accept"][step], torch.stack(accepts).mean(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    want.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-3, atol=1e-5)
    assert (unknown > 0) == config.reduced
