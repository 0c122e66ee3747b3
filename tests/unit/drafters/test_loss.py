"""The drafter's loss against a loop over tokens, and its hand-made gradient against autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import smooth_l1_loss

from megatron_tlt.drafters import loss as module
from megatron_tlt.drafters.eagle.config import Eagle3Config, EagleConfig
from megatron_tlt.drafters.eagle.loss import draft_loss
from megatron_tlt.drafters.eagle.pairs import PairLayout
from megatron_tlt.drafters.loss import LossInputs
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.drafters.training.batching import collate
from tests.helpers.tiny_drafters import DEEP, FAMILIES, lookup_tables, random_drafter, random_sequence

STEPS = 3
CONFIGS = {
    "eagle": EagleConfig.of(FAMILIES["qwen3"]),
    "reduced": Eagle3Config.of(DEEP["qwen3"], draft_vocab_size=60),
    "whole": Eagle3Config.of(DEEP["qwen3"], draft_vocab_size=101),
}
CASES = [(10.0, 0.1, 0.9, 0.8, 1.0), (0.3, 0.7, 0.2, 0.5, 0.6)]


@pytest.mark.parametrize(("w_h", "w_ce", "w_tv", "decay", "t"), CASES, ids=["default", "cold"])
@pytest.mark.parametrize(("name", "at_once"), [("eagle", 1 << 25), ("eagle", 300), ("reduced", 700), ("whole", 700)])
def test_loss_and_gradients_equal_a_loop_over_tokens(
    monkeypatch, name: str, at_once: int, w_h: float, w_ce: float, w_tv: float, decay: float, t: float
) -> None:
    """The docstring's formula, one (base, step) at a time, whole and in blocks. Norm and head of eagle3 are trained,
    too; rows whose drawn token is unknown teach nothing and count as not accepted.
    """
    for constant, value in {"HEAD_BLOCK": at_once, "_CE": w_ce, "_TV": w_tv, "_DECAY": decay}.items():
        monkeypatch.setattr(module, constant, value)
    config = CONFIGS[name]
    embed, head = lookup_tables(config.policy)
    model = KINDS[config.kind].build_model(config)
    model.load_full(random_drafter(config).items())
    sequences = [random_sequence(config, n, p, seed=n) for n, p in ((12, 5), (3, 1), (17, 9), (6, 4))]
    batch = collate(sequences)
    layout = PairLayout(batch)
    given = LossInputs(batch, embed, head, STEPS, w_h, t)
    got, parts = draft_loss(model, model.unroll(embed, batch, layout, STEPS), layout, given)
    (2.0 * got).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()

    ids = model.token_ids() if config.reduced else torch.arange(config.policy.vocab_size)
    want, unknown = torch.zeros(()), 0
    for step, output in enumerate(model.unroll(embed, batch, layout, STEPS)):
        terms, accepts, row = [], [], 0
        for s in sequences:
            for base in range(s.first_base, s.length - 1):
                if base + step <= s.length - 2:  # token base + step + 1 exists
                    state = s.hidden[base + step, -64:]
                    p = torch.softmax(head @ state / t, 0)[ids]
                    log_q = (model.logits(output[row], head) / t).log_softmax(0)
                    p = p / p.sum()
                    is_known = int(s.token_ids[base + step + 1]) in ids.tolist()
                    unknown += not is_known
                    accepts.append(torch.minimum(p, log_q.exp()).sum().detach() * is_known)
                    ce, tv = -(p * log_q).sum(), 0.5 * (p - log_q.exp()).abs().sum()
                    near = smooth_l1_loss(output[row], state) if name == "eagle" else 0.0
                    own = w_ce * ce + w_tv * tv
                    terms.append(w_h * near + own * is_known)
                row += 1
        want = want + decay**step * torch.stack(terms).mean()
        torch.testing.assert_close(parts["accept"][step], torch.stack(accepts).mean(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    (2.0 * want).backward()
    for key, p in model.named_parameters():
        torch.testing.assert_close(gradients[key], p.grad, rtol=1e-3, atol=1e-5)
    assert (unknown > 0) == config.reduced


@pytest.mark.parametrize(("has_products", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_processor_without_products_of_bf16_multiplies_the_head_in_fp32(monkeypatch, has_products, dtype) -> None:
    """An engine in bf16 hands out tables of bf16, also where that takes several times as long."""
    monkeypatch.setattr(module, "has_bf16_products", lambda: has_products)
    config = CONFIGS["reduced"]
    embed, head = (table.bfloat16() for table in lookup_tables(config.policy))
    given = LossInputs(collate([random_sequence(config, 12, 5)]), embed, head, 1, 10.0, 1.0)
    rows = module.PolicyRows.of(given, torch.arange(60), [np.arange(5, 11)], torch.ones(1))
    assert rows.head.dtype == dtype
