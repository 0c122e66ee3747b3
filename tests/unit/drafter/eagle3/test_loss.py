"""The EAGLE-3 loss against a loop over rows, and what it teaches."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.drafter.batching import collate
from megatron_tlt.drafter.eagle3.loss import eagle3_loss
from megatron_tlt.models.eagle.eagle3 import Eagle3Config, Eagle3Model
from megatron_tlt.models.eagle.pairs import PairLayout
from tests.helpers.tiny_drafters import lookup_tables
from tests.helpers.tiny_eagle3 import POLICIES, random_eagle3, random_sequence3

CONFIGS = [Eagle3Config.of(POLICIES["qwen3"], draft_vocab_size=60), Eagle3Config.of(POLICIES["llama"])]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_report_and_gradient_equal_a_loop_over_rows(config, temperature: float) -> None:
    embed, head = lookup_tables(config.policy)
    model = Eagle3Model(config)
    model.load_full(random_eagle3(config))
    sequences = [random_sequence3(config, n, p, seed=n) for n, p in ((12, 5), (3, 1), (17, 9))]
    batch = collate(sequences)
    layout = PairLayout(batch)
    gamma, steps, h = 0.8, 3, config.policy.hidden_size
    outputs = model.unroll(embed, batch, layout, steps)
    loss, parts = eagle3_loss(model, outputs, batch, layout, head, gamma, temperature)
    loss.backward()
    got = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()

    ids = model.token_ids().tolist()
    outputs, want = model.unroll(embed, batch, layout, steps), torch.zeros(())
    for step in range(steps):
        terms, accepts, row = [], [], 0
        for s in sequences:
            for base in range(s.first_base, s.length - 1):
                if base + step <= s.length - 2:
                    p = torch.softmax(head @ s.hidden[base + step, 3 * h :] / temperature, 0)
                    q = torch.softmax(model.logits(outputs[step][row]) / temperature, 0)
                    accepts.append(float(torch.minimum(p[ids], q.detach()).sum()))
                    if int(p.argmax()) in ids:
                        known = p[ids].sum()
                        terms.append(-(p[ids] / known * q.log()).sum())
                row += 1
        assert parts["known"][step] == len(terms) / len(accepts)
        assert parts["accept"][step] == pytest.approx(sum(accepts) / len(accepts), abs=1e-4)
        ce = torch.stack(terms).mean()
        assert parts["ce"][step] == pytest.approx(float(ce.detach()), rel=1e-4)
        want = want + gamma**step * ce
    torch.testing.assert_close(loss, want, rtol=1e-4, atol=1e-5)
    want.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-3, atol=1e-5)
    if config.reduced:
        assert max(parts["known"]) < 1, "the test must have rows that do not count"
