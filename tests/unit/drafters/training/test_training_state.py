"""fp32 state of a drafter in training: against torch's AdamW, divided over ranks, merged and undone in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_tlt.drafters.training.training_state import STATE_NAMES, TrainingState
from tests.helpers.thread_ranks import ThreadRank, on_ranks

LR = 1e-2


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5, bias=False), nn.Linear(5, 3)).to(dtype)


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator).to(dtype) for p in model().parameters()]


def take_steps(state: TrainingState, net: nn.Module, steps: range, share: float = 1.0) -> list[float]:
    norms = []
    for step in steps:
        dtype = next(net.parameters()).dtype
        for p, g in zip(net.parameters(), gradients(step, dtype), strict=True):
            p.grad = g * share
        norm = state.take_gradients()
        state.step(LR, torch.clamp(2.0 / norm, max=1.0))
        state.update_mean(0.5)
        norms.append(float(norm))
    return norms


def torch_adam(dtype: torch.dtype, steps: int) -> tuple[list[torch.Tensor], list[float]]:
    """The same steps by torch, on fp32 weights; gradients are those of `dtype`."""
    net = model(dtype).float()
    optimizer, norms = torch.optim.Adam(net.parameters(), lr=LR, betas=(0.9, 0.95)), []
    for step in range(steps):
        for p, g in zip(net.parameters(), gradients(step, dtype), strict=True):
            p.grad = g.float()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 2.0)))
        optimizer.step()
    return [p.detach() for p in net.parameters()], norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_adams_on_fp32_masters(dtype: torch.dtype) -> None:
    net = model(dtype)
    state = TrainingState(net)
    norms = take_steps(state, net, range(5))
    wanted, wanted_norms = torch_adam(dtype, 5)
    assert norms == pytest.approx(wanted_norms, rel=1e-5)
    named = state.named()
    for (name, p), want in zip(net.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(named["raw"][name], want, atol=1e-6, rtol=1e-5)
        assert p.dtype == dtype and torch.equal(p, named["raw"][name].to(dtype)) and p.grad is None
        assert named["raw"][name].dtype == named["exp_avg_sq"][name].dtype == torch.float32
    assert named["steps"] == 5


def test_masters_start_from_weights_before_they_were_rounded() -> None:
    exact = dict(model().named_parameters())
    state = TrainingState(model(torch.bfloat16), exact)
    assert all(torch.equal(state.named()["raw"][name], p) for name, p in exact.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_of_a_group_keep_a_share_each_and_train_one_drafter(dtype: torch.dtype) -> None:
    alone_net = model(dtype)
    alone = TrainingState(alone_net)
    take_steps(alone, alone_net, range(3))
    alone.remember()
    begun = alone.named()["raw"]["0.weight"].clone()
    take_steps(alone, alone_net, range(3, 5))

    nets = [model(dtype) for _ in range(2)]  # seeded: not in threads

    def work(rank: ThreadRank):
        net = nets[rank.rank]
        state = TrainingState(net, tp=rank)
        take_steps(state, net, range(3), 0.5)  # the two shares add up
        state.remember()
        take_steps(state, net, range(3, 5), 0.5)
        kept = sum(t.numel() for kept in state._kept.values() for t in kept.values())
        named, mean = state.named(), state.mean()
        weights = [p.detach().clone() for p in net.parameters()]
        state.restore()
        return kept, named, mean, weights, state.named(), net

    count = sum(p.numel() for p in alone_net.parameters())
    both = on_ranks(2, work)
    assert sum(kept for kept, *_ in both) == 4 * count and max(kept for kept, *_ in both) < 2.2 * count
    assert all(not both[1][1][kind] for kind in STATE_NAMES)  # gathered for the first rank, which writes the file
    named, before = both[0][1], both[0][4]
    for _, _, mean, weights, _, net in both:
        for kind in STATE_NAMES:
            for name, wanted in alone.named()[kind].items():
                torch.testing.assert_close(named[kind][name], wanted, atol=1e-6, rtol=1e-5)
        for name, wanted in alone.mean().items():
            assert mean[name].dtype == dtype
            torch.testing.assert_close(mean[name], wanted.to(dtype))
        assert all(torch.equal(w, r.to(dtype)) for w, r in zip(weights, named["raw"].values(), strict=True))
        torch.testing.assert_close(before["raw"]["0.weight"], begun)
        assert torch.equal(net[0].weight, before["raw"]["0.weight"].to(dtype))
        other = TrainingState(model(dtype))  # saved by two ranks, loaded by one
        other.load(named)
        assert torch.equal(other.named()["exp_avg"]["1.weight"], named["exp_avg"]["1.weight"])
        assert other.steps == 5
