"""Experts of the actor: what only some devices show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_tlt.actor import experts as module
from megatron_tlt.actor.experts import GroupedExperts, _Dispatcher, _ZeroUnused

# isort: split
from megatron.core.transformer.moe import token_dispatcher

ALIGNED = 16  # bytes, of rows in memory


class Recorder(TorchDispatchMode):
    """Operands of every grouped product, and where groups end."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            self.operands.append(args[:3])
        return func(*args, **(kwargs or {}))


def experts_in_bf16() -> GroupedExperts:
    """Four random ones of 8 x 16."""
    torch.manual_seed(0)
    config = SimpleNamespace(moe_ffn_hidden_size=16, hidden_size=8, params_dtype=torch.bfloat16)
    one = SimpleNamespace(size=lambda: 1)
    experts = GroupedExperts(4, config, SimpleNamespace(expt_tp=one, ep=one, expt_dp=one))
    for weight in experts.parameters():
        torch.nn.init.normal_(weight)
    return experts


def test_gradients_of_experts_without_a_row_are_zero_whatever_the_product_left_there():
    weight = torch.ones(3, 2, 2, requires_grad=True)
    found = torch.full((3, 2, 2), 7.0)
    found[1] = torch.nan
    _ZeroUnused.apply(weight, torch.tensor([2, 0, 1])).backward(found)
    assert weight.grad.tolist() == torch.where(torch.isnan(found), 0, found).tolist()


def test_experts_without_a_row_and_uneven_ones_are_laid_out_as_the_kernel_takes_them():
    """The kernel asserts, on the device: products over rows that experts share out (the weights' gradients) may have
    none of an expert, and any number, only as column-major times row-major.
    """
    experts = experts_in_bf16()
    rows, probs = torch.randn(10, 8, dtype=torch.bfloat16, requires_grad=True), torch.rand(10)
    with Recorder() as seen:
        output, _ = experts(rows, torch.tensor([3, 0, 6, 1]), probs)
        output.backward(torch.randn_like(output))
    shapes = sorted((a.dim(), b.dim()) for a, b, _ in seen.operands)
    assert shapes == [(2, 2)] * 2 + [(2, 3)] * 4
    for a, b, _ in seen.operands:
        if b.dim() == 2:
            assert a.stride(0) == 1 and b.stride(1) == 1
        else:
            assert a.stride(1) == 1, "rows of an expert begin anywhere"
        for strides in (a.stride(), b.stride()):
            assert all(stride * a.element_size() % ALIGNED == 0 for stride in strides if stride != 1)
    for weight in experts.parameters():
        assert not weight.grad[1].any() and all(weight.grad[i].any() for i in (0, 2, 3))


def test_each_expert_meets_few_numbers_of_rows_in_bf16_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As dense layers do (test_microbatch.py); padding changes neither outputs nor gradients."""
    experts = experts_in_bf16()
    given, toward = torch.randn(2, 139, 8, dtype=torch.bfloat16)
    found = []
    for is_padded in (True, False):
        if not is_padded:
            monkeypatch.setattr(module, "row_multiple", lambda *_: 1)
        rows, probs = given.clone().requires_grad_(), torch.linspace(0.1, 0.9, 139, requires_grad=True)
        with Recorder() as seen:
            output, _ = experts(rows, torch.tensor([3, 0, 135, 1]), probs)
            grads = torch.autograd.grad(output, (rows, probs, *experts.parameters()), toward)
        ends = [[128, 128, 384, 512] if is_padded else [3, 3, 138, 139]]
        assert [of.tolist() for *_, of in seen.operands] == ends * 6
        found.append((output, *grads))
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).norm() <= 1e-2 * theirs.norm()


@pytest.mark.parametrize(("exchanges", "fused", "moved"), [(True, True, 3), (False, True, 0), (False, False, 1)])
def test_only_split_sizes_of_an_exchange_leave_the_device(
    monkeypatch: pytest.MonkeyPatch, exchanges: bool, fused: bool, moved: int
) -> None:
    """Of a GPU's layer. Without fused permutation megatron needs the counts of all ranks for each expert, too."""
    to_host: list[object] = []
    monkeypatch.setattr(
        token_dispatcher, "maybe_move_tensor_to_cpu", lambda t, **_: t if t is None or t == 7 else to_host.append(t)
    )
    dispatcher = object.__new__(_Dispatcher)
    dispatcher.config = SimpleNamespace(moe_permute_fusion=fused)
    dispatcher.drop_and_pad, dispatcher.num_local_experts, dispatcher.num_out_tokens = False, 4, 7
    dispatcher.cuda_dtoh_stream = torch.cuda.Stream()  # the CPU's, of `actor/compat.py`
    dispatcher.cuda_dtoh_point = dispatcher.cuda_sync_point = "before_permutation_1"
    sizes = ["sent", "received", "gathered"] if exchanges else [None] * 3
    dispatcher.input_splits, dispatcher.output_splits, dispatcher.output_splits_tp = sizes
    dispatcher.num_global_tokens_per_local_expert = "of all ranks"
    counts = torch.tensor([3, 0, 6, 1])
    assert dispatcher._maybe_dtoh_and_synchronize("before_permutation_1", counts) is counts
    assert len(to_host) == moved
