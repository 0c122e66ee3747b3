"""The norm against PyTorch's, its backward pass against finite differences; the rotation of bf16 heads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_tlt.actor import attention
from megatron_tlt.actor.elementwise import RMSNormFunction
from megatron_tlt.models.decoders.torch.layers import rotate

ROWS, WIDTH = 5, 8


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def test_norm_equals_pytorch() -> None:
    x, weight = _random(ROWS, 1, WIDTH), _random(WIDTH)
    expected = F.rms_norm(x, (WIDTH,), weight, 1e-3)
    torch.testing.assert_close(RMSNormFunction.apply(x, weight, 1e-3), expected)
    assert torch.autograd.gradcheck(lambda x, w: RMSNormFunction.apply(x, w, 1e-3), (x, weight))
    assert torch.autograd.gradcheck(lambda x, w: RMSNormFunction.apply(x.transpose(0, 2), w, 1e-3), (x, _random(5)))


def test_bf16_heads_are_rotated_in_fp32(monkeypatch) -> None:
    """Where attention computes in bf16, as on CUDA, rotated heads are rounded once, as in the engines."""
    monkeypatch.setattr(attention, "inner_dtype", lambda dtype, device: dtype)
    layer = attention.SDPACoreAttention(
        SimpleNamespace(attention_dropout=0.0, kv_channels=WIDTH), pg_collection=SimpleNamespace(cp=None)
    )
    monkeypatch.setattr(layer, "attend", lambda q, k, v, packing: torch.cat((q, k, v), 2))
    heads = [_random(64, 1, n, WIDTH).detach().bfloat16() for n in (4, 2, 2)]
    cos, sin = attention.rotation(torch.arange(64) * 99, 1.0 / 10 ** torch.arange(WIDTH // 2))
    found = layer(*heads, None, attention.PackedRows(rotation=(cos, sin)))
    table = torch.cat((cos[..., : WIDTH // 2], sin), -1)[:, 0, 0].double()
    exact = torch.cat([*(rotate(x[:, 0].double(), table) for x in heads[:2]), heads[2][:, 0]], 1)
    assert found.dtype is torch.bfloat16
    assert ((found[:, 0].double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


@pytest.mark.parametrize(
    ("device", "dtype", "heads"), [("cuda", torch.float32, 4), ("cuda", torch.bfloat16, 2), ("cpu", torch.float32, 2)]
)
def test_fp32_on_cuda_has_keys_and_values_for_each_query_head(device, dtype, heads, monkeypatch) -> None:
    """No fused kernel takes grouped ones there: all scores of a sequence would be made, and kept."""
    seen = []

    def attends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        seen.append((k.size(1), v.size(1), options["enable_gqa"]))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", attends)
    layer = attention.SDPACoreAttention(
        SimpleNamespace(attention_dropout=0.0, kv_channels=WIDTH), pg_collection=SimpleNamespace(cp=None)
    )
    with FakeTensorMode():
        q, k, v = (torch.empty(6, 1, n, WIDTH, dtype=dtype, device=device) for n in (4, 2, 2))
        layer.attend(q, k, v, attention.PackedRows(runs=((2, 3),)))
    assert seen == [(heads, heads, heads == 2)]


def test_norm_of_bf16_is_rounded_once() -> None:
    x, weight, grad = (_random(*shape).detach().bfloat16() for shape in ((7, 64), (64,), (7, 64)))
    small, wide = (
        [t.clone().requires_grad_() for t in (x.to(dtype), weight.to(dtype))] for dtype in (x.dtype, torch.float64)
    )
    out, expected = RMSNormFunction.apply(*small, 1e-3), F.rms_norm(wide[0], (64,), wide[1], 1e-3)
    out.backward(grad)
    expected.backward(grad.double())
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(small, wide, strict=True))]
    for found, exact in pairs:
        assert found.dtype is torch.bfloat16
        assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()
