"""The kernels between a layer's products against PyTorch, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.models.decoders.torch.kernels.layers import FUSED
from megatron_tlt.models.decoders.torch.layers import PLAIN
from tests.helpers.interpreted import DEVICE, normal

DTYPES = {torch.float32: {"atol": 1e-6, "rtol": 2e-6}, torch.bfloat16: {"atol": 1e-3, "rtol": 2**-6}}


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("hidden", [64, 200])
def test_sum_and_norm(dtype: torch.dtype, hidden: int) -> None:
    x, part, weight = (normal(n, hidden, dtype=dtype, seed=n) for n in (5, 5, 1))
    x[4] = part[4] = 0  # a row of zeros has a norm of zeros
    for added in (part, None):
        got, want = (ops.add_norm(x, added, weight[0], 1e-6) for ops in (FUSED, PLAIN))
        assert torch.equal(got[0], want[0])
        torch.testing.assert_close(got[1], want[1], **DTYPES[dtype])


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(7, 1, 24), (4, 2, 16), (0, 2, 16)])
def test_rotation_fills_the_cache(dtype: torch.dtype, has_norms: bool, heads: int, kv_heads: int, d: int) -> None:
    """Slots in any order, int32 and int64; what no row names stays. Also of keys and values without queries."""
    qkv, angle = normal(6, (heads + 2 * kv_heads) * d, dtype=dtype), normal(6, d // 2)
    rope = torch.cat([angle.cos(), angle.sin()], -1)
    norms = (normal(d, dtype=dtype, seed=1), normal(d, dtype=dtype, seed=2), 1e-6) if has_norms else None
    slots = torch.tensor([9, 0, 31, 4, 5, 12], device=DEVICE)
    want_cache = normal(2, 32, kv_heads, d, dtype=dtype, seed=3)
    for kind in (torch.int64, torch.int32):
        got_cache, expected = want_cache.clone(), want_cache.clone()
        got = FUSED.rotate_into(qkv, norms, rope, slots.to(kind), got_cache)
        want = PLAIN.rotate_into(qkv, norms, rope, slots, expected)
        # what is rounded to bf16 before the rotation may round the other way
        bounds = DTYPES[dtype] if dtype == torch.float32 else {"atol": 0.03, "rtol": 2**-7}
        torch.testing.assert_close(got, want, **bounds)
        torch.testing.assert_close(got_cache, expected, **bounds)
        assert torch.equal(got_cache[1], expected[1])


def test_gated_silu(dtype: torch.dtype) -> None:
    both = normal(3, 2 * 1100, dtype=dtype) * 4
    torch.testing.assert_close(FUSED.gated_silu(both), PLAIN.gated_silu(both), **DTYPES[dtype])
