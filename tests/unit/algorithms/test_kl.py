"""Expectations of the KL estimators under the policy, over all tokens of a small vocabulary."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.algorithms.kl import Estimator, kl_estimate
from megatron_tlt.config.algorithm import AlgorithmSection
from megatron_tlt.config.checks.learning import kl_estimator_warning


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_estimator_whose_gradient_is_0_on_average_has_a_warning(estimator: Estimator) -> None:
    rng = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 6, generator=rng, dtype=torch.float64)
    logits.requires_grad_()
    logp, ref = logits.log_softmax(-1), reference.log_softmax(-1)
    expected = (logp.exp().detach() * kl_estimate(logp, ref, estimator)).sum()
    [gradient] = torch.autograd.grad(expected, logits, retain_graph=True)
    [of_kl] = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits)
    warning = kl_estimator_warning(AlgorithmSection(kl_coef=0.1, kl_estimator=estimator))
    assert (gradient.abs().max() < 1e-12) == (warning is not None) == (estimator == "k1")
    assert torch.allclose(gradient, of_kl) == (estimator == "k2")


def test_k1_has_no_warning_where_it_is_no_term_of_the_loss() -> None:
    for settings in ({}, {"kl_coef": 0.1, "kl_in": "reward"}, {"name": "distill", "teacher": "t"}):
        assert kl_estimator_warning(AlgorithmSection(kl_estimator="k1", **settings)) is None
