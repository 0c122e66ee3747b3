"""Paged attention by the Triton kernel against gathered attention, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.models.decoders.inputs import DecoderInput
from megatron_tlt.models.decoders.torch import attention
from megatron_tlt.models.decoders.torch.attention import BlockPlan, RaggedPlan, StaticPlan
from megatron_tlt.models.decoders.torch.decoder import TorchDecoder
from megatron_tlt.models.decoders.torch.kernels.attention import attend
from megatron_tlt.models.decoders.torch.paged import PagedPlan
from megatron_tlt.models.hf.config import ModelConfig
from tests.helpers.interpreted import DEVICE
from tests.helpers.tiny_models import Driver, random_weights, rows_input


def ragged(contexts: list[tuple[int, int]]) -> DecoderInput:
    """Chains: (cached positions before, rows) of each sequence, in shuffled blocks of 16."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()
    width = -(-max(a + n for a, n in contexts) // 16)
    tables = [[order.pop() for _ in range(width)] for _ in contexts]
    rows = [range(first, first + n) for first, n in contexts]
    return rows_input(rows, [first for first, _ in contexts], tables, device=DEVICE)


def cache_and_queries(rows: int, heads: int, kv_heads: int, d: int, slots: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(n, h, d, generator=generator) for n, h in ((rows, heads), (slots, kv_heads), (slots, kv_heads))]
    return [t.to(DEVICE, dtype) for t in made]


# Sequences (cached positions, rows), splits, heads, kv heads, head size: G 2, 7 and 1; sizes that are no power of two.
RAGGED = [(0, 1), (130, 1), (63, 5), (0, 40), (17, 35)]
STATIC, SINGLE = [(70, 5), (0, 5), (33, 5)], [(150, 1), (63, 1), (40, 1)]
CASES = [
    ("ragged", RAGGED, 1, 4, 2, 16),
    ("ragged", RAGGED, 4, 7, 1, 24),
    ("ragged", RAGGED, 1, 6, 6, 40),
    ("static", STATIC, None, 6, 2, 32),
    ("visible", SINGLE, 1, 4, 2, 16),
    ("visible", SINGLE, 2, 4, 2, 16),
]


@pytest.mark.parametrize(("kind", "contexts", "splits", "heads", "kv_heads", "d"), CASES)
def test_paged_attention_equals_gathered_attention(kind, contexts, splits, heads, kv_heads, d):
    """Static batches have tables wider than any context, as a graph's bucket is, with padding that names a scratch
    block. With a first visible position, as the drafter needs it, a row sees itself and nothing before that position.
    Everything behind a context, and the scratch block, is NaN.
    """
    batch, visible, rows_each = ragged(contexts), None, None
    if kind != "ragged":
        rows_each = contexts[0][1]
    if kind == "static":
        scratch = torch.full((3, 8), 64, dtype=torch.int32, device=DEVICE)
        scratch[:, : batch.block_tables.shape[1]] = batch.block_tables
        batch.block_tables = scratch
    if kind == "visible":
        visible = torch.tensor([100, 99, 1]).to(DEVICE)
    q, keys, values = cache_and_queries(len(batch.positions), heads, kv_heads, d, 65 * 16)
    gathered = RaggedPlan(batch, 16) if rows_each is None else StaticPlan(batch, 16, rows_each, visible)
    paged = PagedPlan(attend, batch, 16, (kv_heads, heads // kv_heads), rows_each, visible, splits)
    want, seen = gathered.attend(q, keys, values), torch.zeros(65 * 16, dtype=torch.bool)
    for s, end in enumerate(batch.context_lens.tolist()):
        seen[[int(batch.block_tables[s, p // 16]) * 16 + p % 16 for p in range(end)]] = True
    keys[~seen], values[~seen] = float("nan"), float("nan")
    torch.testing.assert_close(paged.attend(q, keys, values), want, atol=2e-6, rtol=2e-5)


# Slots of a block, heads, kv heads, head size, splits, window: a tile of all heads, several tiles a
# block; windows that end in the cache and in front of it.
BLOCKS = [(6, 4, 2, 16, 1, 0), (6, 4, 2, 16, 4, 40), (8, 7, 1, 24, 2, 0), (8, 7, 1, 24, 1, 33), (32, 7, 1, 16, 1, 50)]


@pytest.mark.parametrize(("size", "heads", "kv_heads", "d", "splits", "window"), BLOCKS)
def test_blocks_see_their_own_slots_and_what_is_cached(size, heads, kv_heads, d, splits, window):
    """Anchors behind 130, 97, 16 and no cached positions, the last one padding; of the first two the first positions
    are not seen. Slots of the cache that no block may see are NaN, tables wider than any context.
    """
    batch, low = ragged([(130, size), (97, size), (16, size), (0, size)]), torch.tensor([100, 1, 0, 0]).to(DEVICE)
    own = torch.arange(4 * size, device=DEVICE)
    batch.slot_mapping, tables = own, torch.full((4, 12), 64, dtype=torch.int32, device=DEVICE)
    tables[:, : batch.block_tables.shape[1]] = batch.block_tables
    batch.block_tables = tables
    q, keys, values = cache_and_queries(4 * size, heads, kv_heads, d, 65 * 16)
    near = torch.stack(cache_and_queries(4 * size, heads, kv_heads, d, 4 * size)[1:])
    first = batch.positions.view(4, size)[:, 0].tolist()
    gathered = BlockPlan(batch.positions.view(4, size), low, tables, 16)
    want = gathered.attend(q, keys, values, near, window)
    seen = torch.zeros(65 * 16, dtype=torch.bool)
    for s in range(4):
        for p in range(max(int(low[s]), first[s] - window + 1 if window else 0), first[s]):
            seen[int(tables[s, p // 16]) * 16 + p % 16] = True
    keys[~seen], values[~seen] = float("nan"), float("nan")
    paged = PagedPlan(attend, batch, 16, (kv_heads, heads // kv_heads), size, low, splits)
    got = paged.attend(q, keys, values, near, window)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("device", "dtype", "is_masked", "kv_heads"),
    [
        ("cuda", torch.float32, False, 6),
        ("cuda", torch.bfloat16, True, 6),
        ("cuda", torch.bfloat16, False, 2),
        ("cpu", torch.float32, True, 2),
    ],
)
def test_keys_are_repeated_where_no_fused_kernel_takes_grouped_ones(device, dtype, is_masked, kv_heads):
    """All scores would be made there."""
    with FakeTensorMode():
        q, k, v = (torch.empty(2, n, 9, 32, dtype=dtype, device=device) for n in (6, 2, 2))
        assert [t.shape for t in attention.heads_for(q, k, v, is_masked)] == [(2, kv_heads, 9, 32)] * 2


def test_gathered_attention_asks_for_its_heads_and_has_a_mask(monkeypatch):
    """Repeated ones give the same."""
    batch = ragged([(33, 5), (70, 5)])
    batch.slot_mapping = torch.arange(10, device=DEVICE)
    q, keys, values = cache_and_queries(10, 6, 2, 32, 64 * 16)
    own = torch.stack([keys[:10], values[:10]])
    places, low = batch.positions.view(2, 5), torch.zeros(2, device=DEVICE)

    def attended() -> list[torch.Tensor]:
        blocks = BlockPlan(places, low, batch.block_tables, 16)
        return [StaticPlan(batch, 16, 5).attend(q, keys, values), blocks.attend(q, keys, values, own)]

    def repeated(query: torch.Tensor, *heads: torch.Tensor, is_masked: bool) -> list[torch.Tensor]:
        asked.append(is_masked)
        return [t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in heads]

    want, asked = attended(), []
    monkeypatch.setattr(attention, "heads_for", repeated)
    torch.testing.assert_close(attended(), want)
    assert asked == [True, True]


# Heads and kv heads of Qwen2.5 0.5B (and of 7B over TP 2), 1.5B, 7B, and of 7B over TP 4.
@pytest.mark.parametrize("heads", [(14, 2), (12, 2), (28, 4), (7, 1)])
@pytest.mark.parametrize("batch_size", [1, 8, 128])
def test_splits_fill_the_processors_and_are_no_more(heads, batch_size, monkeypatch):
    """132 processors, contexts of up to 4096 positions: without splits where sequences fill them, else a program each
    (half of them with one kv head), at most two.
    """
    monkeypatch.setattr("megatron_tlt.models.decoders.torch.paged._processors", lambda device: 132)
    (query_heads, kv_heads), row = heads, torch.zeros(batch_size, dtype=torch.int32, device=DEVICE)
    starts, tables = torch.arange(batch_size + 1, device=DEVICE), row.new_zeros(batch_size, 256)
    batch = DecoderInput.of([row, row, row, starts, row, tables, row])
    splits = PagedPlan(attend, batch, 16, (kv_heads, query_heads // kv_heads), rows_each=1).splits
    programs = batch_size * kv_heads
    if programs >= 132:
        assert splits == 1
    else:
        assert (64 if programs == 1 else 128) <= programs * splits <= 2 * 132


def test_half_precision_stays_within_its_rounding():
    """bf16 on a GPU; Triton's interpreter has no bf16 products, so fp16 there."""
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    batch = ragged([(200, 1), (90, 3)])
    q, keys, values = cache_and_queries(4, 8, 2, 64, 64 * 16, dtype)
    exact = RaggedPlan(batch, 16).attend(q.float(), keys.float(), values.float())
    got = PagedPlan(attend, batch, 16, (2, 4), splits=2).attend(q, keys, values)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), exact, atol=4e-3, rtol=1.6e-2)


def test_a_decoder_and_its_drafter_compute_the_same_without_gathering():
    config = ModelConfig("qwen3", 101, 64, 2, 6, 2, 16, 96, qk_norm=True, max_position_embeddings=256)
    outputs = []
    for paged in (None, attend):
        decoder = TorchDecoder(config, DEVICE, paged=paged)
        decoder.load_weights(random_weights(config))
        driver = Driver(decoder)
        driver.step([(0, list(range(40))), (1, [3])])
        outputs.append(driver.step([(0, [7]), (1, list(range(50))), (2, [9, 8])]))
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits, atol=2e-5, rtol=1e-5)
    assert KINDS["eagle"].build_decoder(decoder, EagleConfig.of(decoder.config)).policy.paged is decoder.paged
