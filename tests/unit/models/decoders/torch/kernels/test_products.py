"""Products whose rows do not depend on each other, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch.nn.functional import linear

from megatron_tlt.models.decoders.torch.kernels.products import product
from tests.helpers import interpreted
from tests.helpers.budget import noted_launches
from tests.helpers.interpreted import products_by_rows

normal = partial(interpreted.normal, power=0.25)
# Columns, K, whether there is a bias: one tile that is not full; several of both; splits of K, the last one shorter.
SHAPES = [(24, 40, True), (300, 200, False), (130, 1100, True)]


@pytest.fixture(autouse=True)
def _by_rows() -> Iterator[None]:
    with products_by_rows():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("columns", "k", "has_bias"), SHAPES)
def test_a_row_alone_equals_the_row_in_every_batch(columns: int, k: int, has_bias: bool, dtype: torch.dtype) -> None:
    """In batches of one tile, of several, and whatever stands beside it; the values are those of PyTorch."""
    weight = normal(columns, k, dtype=dtype, seed=1)
    bias = normal(columns, dtype=dtype, seed=2) if has_bias else None
    rows = normal(3, k, dtype=dtype, seed=3)
    alone = [product(row[None], weight, bias) for row in rows]
    for size in (3, 17, 64, 150):
        batch, places = normal(size, k, dtype=dtype, seed=size), (0, size // 2, size - 1)
        for place, row in zip(places, rows, strict=True):
            batch[place] = row
        got = product(batch, weight, bias)
        for place, want in zip(places, alone, strict=True):
            assert torch.equal(got[place : place + 1], want), f"row {place} of {size}"
    exact = linear(batch.double(), weight.double(), None if bias is None else bias.double())
    bound = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 2**-7}
    torch.testing.assert_close(got.double(), exact, **bound)
    out = torch.full_like(got, float("nan"))
    assert product(batch, weight, bias, out) is out and torch.equal(out, got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tile_and_splits_follow_from_the_matrix_alone(dtype: torch.dtype) -> None:
    """Of Qwen2.5-7B: enough programs for an H100 at one row, and the same tile and order of sums for all rows."""
    for n, k in ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (152064, 3584)):
        with noted_launches() as launches:
            for rows in (1, 64, 256, 4096):
                product(*(torch.empty(s, dtype=dtype, device="meta") for s in ((rows, k), (n, k))))
        found = [launch for launch in launches if launch.name == "_product"]
        forms = {(tuple(f.arguments[x] for x in ("ROWS", "COLUMNS", "STEP", "SPLITS")), f.grid[1:]) for f in found}
        assert len(found) == 4 and len(forms) == 1
        assert found[0].grid[0] == 1 and found[0].grid[1] * found[0].grid[2] >= 100
