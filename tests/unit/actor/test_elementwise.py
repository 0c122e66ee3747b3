"""The norm against PyTorch's, its backward pass against finite differences; the rotation of bf16 heads."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F

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
