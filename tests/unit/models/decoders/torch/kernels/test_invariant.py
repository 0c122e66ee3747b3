"""The PyTorch decoder with invariant numerics and Triton's kernels: a row's bits depend on its own tokens only.

In Triton's interpreter or on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megatron_tlt.models.decoders.torch.attention import RaggedPlan
from megatron_tlt.models.decoders.torch.decoder import TorchDecoder
from megatron_tlt.models.decoders.torch.kernels import experts
from megatron_tlt.models.decoders.torch.kernels.attention import attend
from megatron_tlt.models.decoders.torch.kernels.layers import FUSED, INVARIANT
from megatron_tlt.models.decoders.torch.paged import PagedPlan
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.rollout.graph_pool import GraphPool, PoolSizes
from tests.helpers.interpreted import DEVICE, normal, products_by_rows
from tests.helpers.tiny_models import Driver, moe_config, random_weights, rows_input

BLOCK, BLOCKS = 16, 64
DENSE = ModelConfig("qwen3", 77, 48, 2, 3, 1, 24, 80, qk_norm=True, max_position_embeddings=256)
SPARSE = moe_config("qwen3_moe", 61)  # of qwen2_moe a CPU rounds the shared expert's sigmoid by its place in a call
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def _by_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter takes milliseconds a program, so there are 4 splits for one kv head, not 32."""
    monkeypatch.setattr("megatron_tlt.models.decoders.torch.paged._INVARIANT_PROGRAMS", 4)
    with products_by_rows():
        yield


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(7, 1, 24), (2, 2, 16)])
def test_attention_of_a_row_does_not_depend_on_its_block(heads: int, kv_heads: int, d: int, dtype: torch.dtype) -> None:
    """Rows of a sequence alone, in blocks of 2 to 32 and with padding behind them; what none may see is NaN. A fold of
    positions begins in the middle of the blocks.
    """
    length, first = 150, 118
    table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()[: -(-length // BLOCK)]
    at = torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(length)])
    keys, values = (normal((BLOCKS + 1) * BLOCK, kv_heads, d, dtype=dtype, seed=s) for s in (1, 2))
    unseen = torch.ones(len(keys), dtype=torch.bool)
    unseen[at] = False
    keys[unseen], values[unseen] = float("nan"), float("nan")
    q = normal(length, heads, d, dtype=dtype, seed=3)

    def attended(start: int, rows: int, padding: int = 0) -> torch.Tensor:
        batch = rows_input([[0] * (rows + padding)], [start], [table], BLOCK, DEVICE) if not padding else None
        if batch is None:
            batch = rows_input([[0] * rows], [start], [[*table, BLOCKS]], BLOCK, DEVICE)
            more = batch.positions.new_zeros(padding)
            batch = replace(
                batch,
                token_ids=torch.cat([batch.token_ids, more]),
                positions=torch.cat([batch.positions, more]),
                slot_mapping=torch.cat([batch.slot_mapping, more + BLOCKS * BLOCK]),
                query_start=batch.query_start.new_tensor([0, rows + padding]),
            )
        each = rows + padding
        plan = PagedPlan(attend, batch, BLOCK, (kv_heads, heads // kv_heads), each, is_invariant=True)
        asked = torch.cat([q[start : start + rows], q[:padding]])
        return plan.attend(asked, keys, values)[:rows]

    block = attended(first, 32)
    for row in (0, 1, 9, 10, 31):
        assert torch.equal(attended(first + row, 1), block[row : row + 1]), f"row {row} alone"
    for start, size in ((0, 2), (8, 5)):
        assert torch.equal(attended(first + start, size), block[start : start + size]), f"blocks of {size}"
    assert torch.equal(attended(first, 14, padding=2), block[:14])
    last = rows_input([[0] * 32], [first], [table], BLOCK, DEVICE)
    want = RaggedPlan(last, BLOCK).attend(q[first:].double(), keys.double(), values.double())
    bound = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 2**-6}
    torch.testing.assert_close(block.double(), want, **bound)


@DTYPES
def test_experts_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    """80 rows of 3 experts have a larger tile by default."""
    h, router = normal(80, 64, dtype=dtype, seed=1), normal(3, 64, dtype=dtype, seed=2)
    gate_up, down = (normal(*s, dtype=dtype, seed=3) * 64**-0.5 for s in ((3, 80, 64), (3, 64, 40)))

    def mixed(rows: torch.Tensor, ops=INVARIANT) -> torch.Tensor:
        return ops.mix_experts(rows, *ops.route(rows, router, 2, True), gate_up, down)

    among = mixed(h)
    for place, size in ((0, 1), (71, 1), (40, 17)):
        assert torch.equal(mixed(h[place : place + size].contiguous()), among[place : place + size])
    bound = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(among, mixed(h, FUSED), **bound)
    assert experts._TILES[-1][1][0] == 16


def made(config: ModelConfig, dtype: torch.dtype) -> TorchDecoder:
    decoder = TorchDecoder(config, DEVICE, dtype, invariant=True, paged=attend, ops=INVARIANT)
    decoder.load_weights(random_weights(config))
    return decoder


def tokens(n: int, seed: int) -> list[int]:
    return torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(DENSE, torch.float32), (DENSE, torch.bfloat16), (SPARSE, torch.bfloat16)],
    ids=["dense fp32", "dense bf16", "experts bf16"],
)
def test_prefill_decoding_and_verifying_give_the_same_logits(config: ModelConfig, dtype: torch.dtype) -> None:
    """One prefill; chunks and steps of one row; a block among other sequences, as the ragged and the captured forward
    compute it, the latter padded in rows, sequences and tables.
    """
    decoder, ids, first = made(config, dtype), tokens(13, 1), 10
    whole = Driver(decoder).step([(0, ids)])
    steps = Driver(decoder, seed=1)
    parts = [steps.step([(0, ids[:6])]), steps.step([(0, ids[6:first])])]
    parts += [steps.step([(0, [token])]) for token in ids[first:]]
    for name in ("logits", "hidden"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name)), name

    among = Driver(decoder, seed=2)
    among.step([(1, tokens(4, 2)), (0, ids[:first]), (2, tokens(2, 3))])
    ragged = among.step([(2, [5]), (0, ids[first:]), (1, [8, 9])])
    pool = GraphPool(decoder, among.kv, PoolSizes(4, 96, BLOCK, 64))
    tables = [[*among.tables[s], among.free.pop()] for s in (2, 0, 1)]
    batch = rows_input([[5], ids[first:], [8, 9]], [2, first, 4], tables, BLOCK)
    batch.all_hidden = True
    for got in (ragged, pool.run(batch)):
        here = slice(1, 1 + len(ids) - first)
        assert torch.equal(got.logits[here].float(), whole.logits[first:])
        assert torch.equal(got.hidden[here], whole.hidden[first:])


def test_the_default_kernels_agree() -> None:
    decoder, ids = made(DENSE, torch.float32), tokens(9, 5)
    default = TorchDecoder(DENSE, DEVICE, paged=attend, ops=FUSED)
    default.load_weights(random_weights(DENSE))
    got, want = (Driver(d).step([(0, ids)]).logits for d in (decoder, default))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
