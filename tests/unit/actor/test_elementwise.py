"""Elementwise functions against formulas in plain PyTorch, their backward passes against finite differences."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_tlt.actor.attention import rotation
from megatron_tlt.actor.elementwise import RMSNormFunction, Rotate, swiglu

ROWS, HEADS, WIDTH = 5, 3, 8


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def test_rotation_is_a_complex_product() -> None:
    positions, inv_freq = torch.tensor([0, 1, 2, 0, 7]), torch.tensor([1.0, 0.5, 0.1, 0.01])
    cos, sin = rotation(positions, inv_freq, torch.float64)
    x = _random(ROWS, 1, HEADS, WIDTH)
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(
        torch.ones(ROWS, 4), torch.outer(positions.float(), inv_freq)
    ).view(ROWS, 1, 1, 4)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(Rotate.apply(x, cos, sin), expected, rtol=1e-6, atol=1e-6)
    assert torch.autograd.gradcheck(lambda x: Rotate.apply(x, cos, sin), (x,))


def test_norm_equals_pytorch() -> None:
    x, weight = _random(ROWS, 1, WIDTH), _random(WIDTH)
    expected = F.rms_norm(x, (WIDTH,), weight, 1e-3)
    torch.testing.assert_close(RMSNormFunction.apply(x, weight, 1e-3), expected)
    assert torch.autograd.gradcheck(lambda x, w: RMSNormFunction.apply(x, w, 1e-3), (x, weight))
    assert torch.autograd.gradcheck(lambda x, w: RMSNormFunction.apply(x.transpose(0, 2), w, 1e-3), (x, _random(5)))


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


def test_swiglu_equals_pytorch() -> None:
    x = _random(ROWS, 1, 2 * WIDTH)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(swiglu(x), F.silu(gate) * up)
    assert torch.autograd.gradcheck(swiglu, (x,))
