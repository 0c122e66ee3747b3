"""The kernels of a layer's experts against PyTorch, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_tlt.models.decoders.torch.kernels import experts
from megatron_tlt.models.decoders.torch.kernels.layers import FUSED
from megatron_tlt.models.decoders.torch.layers import PLAIN
from tests.helpers import interpreted
from tests.helpers.budget import noted_launches

normal = partial(interpreted.normal, power=0.5)
# rows, hidden, experts, chosen, width: no expert without and some without rows; sizes that no tile divides; many rows
SHAPES = [(1, 64, 8, 2, 24), (37, 136, 6, 3, 72), (70, 64, 3, 2, 40), (80, 64, 3, 2, 40)]


# Triton's interpreter has no bf16 products
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_go_to_their_experts(dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, hidden, count, k, width = shape
    monkeypatch.setattr(experts, "_SCANNED", 64)  # several turns of a loop that would need thousands of rows
    h, router = normal(rows, hidden, dtype=dtype, seed=1) * 8, normal(count, hidden, dtype=dtype, seed=2)
    gate_up = normal(count, 2 * width, hidden, dtype=dtype, seed=3)
    down = normal(count, hidden, width, dtype=dtype, seed=4)
    for renormalise in (False, True):
        (gates, ids), (want_gates, want_ids) = (ops.route(h, router, k, renormalise) for ops in (FUSED, PLAIN))
        assert torch.equal(ids, want_ids.to(ids.dtype))
        torch.testing.assert_close(gates, want_gates, atol=1e-6, rtol=1e-5)
    got, want = (ops.mix_experts(h, gates, ids, gate_up, down) for ops in (FUSED, PLAIN))
    bound = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(got, want, atol=bound * float(want.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("rows", "tile"), [(256, (16, 32, 4)), (600, (64, 64, 4)), (768, (64, 64, 4)), (2048, (128, 64, 8))]
)
def test_prefill_chunks_have_large_tiles(rows: int, tile: tuple[int, int, int]) -> None:
    """Of Qwen3-30B-A3B, whose 128 experts have rows / 16 each: as vLLM's measured tables for an H100 grow."""
    h = torch.empty(rows, 2048, dtype=torch.bfloat16, device="meta")
    gates, ids = h.new_empty(rows, 8, dtype=torch.float32), h.new_empty(rows, 8, dtype=torch.int32)
    with noted_launches() as launches:
        experts.mix_experts(h, gates, ids, h.new_empty(128, 1536, 2048), h.new_empty(128, 2048, 768))
    products = [n.arguments for n in launches if n.name in ("_gate_up", "_down")]
    assert [(a["ROWS"], a["COLUMNS"], a["num_warps"]) for a in products] == [tile, tile]
