"""The native drafter against plain PyTorch; drafts ignore batch and threads, and know where to stop."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_tlt.errors import BackendError, CheckpointError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.base import BUCKET_WIDTH, BUCKETS, DEPTHS, DraftParams, DraftRows
from megatron_tlt.models.eagle.torch_drafter import TorchEagle
from megatron_tlt.models.keys import row_keys
from megatron_tlt.models.native.decoder import NativeDecoder
from megatron_tlt.models.native.eagle import NativeEagle
from megatron_tlt.models.torch.decoder import TorchDecoder
from megatron_tlt.rollout.sampler import gumbel_noise
from tests.helpers.pairs import Pairs, draft_params, eagle_weights, expected, states
from tests.helpers.tiny_models import random_weights

DTYPES = (torch.float32, torch.bfloat16)
CONFIGS = {
    "qwen2": ModelConfig("qwen2", 131, 96, 2, 6, 2, 32, 200, qkv_bias=True, tie_word_embeddings=True),
    "qwen3": ModelConfig("qwen3", 77, 68, 2, 4, 4, 24, 90, qk_norm=True, tie_word_embeddings=True),
    # 72 columns of queries: keys begin in the middle of a panel of weights
    "odd": ModelConfig("qwen2", 73, 72, 1, 3, 3, 24, 90, qkv_bias=True, tie_word_embeddings=True),
    "llama": ModelConfig("llama", 4200, 64, 1, 8, 1, 64, 96, max_position_embeddings=700),
}

LONGEST = 700


def make(name: str, dtype: torch.dtype = torch.float32, threads: int = 1, tp=None) -> NativeEagle:
    policy = NativeDecoder(CONFIGS[name], dtype, tp=tp)
    policy.load_weights(random_weights(CONFIGS[name]))
    drafter = NativeEagle(policy, threads, tp)
    drafter.load_weights(eagle_weights(CONFIGS[name]))
    return drafter


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 70, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def chunk(config: ModelConfig, seq: int, at: int, end: int) -> tuple[int, int, list[int], Tensor]:
    """Pairs at .. end - 1 of a sequence, which has one content whatever is asked of it."""
    return seq, at, ids(LONGEST, seq)[at:end], states(LONGEST, config, seq)[at:end]


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_equals_plain_pytorch(name: str) -> None:
    config, drafter = CONFIGS[name], make(name)
    pairs = Pairs(drafter, 4)
    for ends, visible in (((40, 515, 3, 17), (1, 1, 1, 1)), ((41, 530, 9, 33), (1, 513, 2, 20))):
        begins = (1, 1, 1, 1) if visible == (1, 1, 1, 1) else (40, 515, 3, 20)
        chunks = [chunk(config, i, begins[i], ends[i]) for i in range(4)]
        out = drafter.forward(pairs.input(chunks, list(visible)), pairs.kv)
        for i, (end, first) in enumerate(zip(ends, visible, strict=True)):
            content = chunk(config, i, first, end)
            logits, hidden = expected(
                config, random_weights(config), eagle_weights(config), *content[2:], first
            )
            torch.testing.assert_close(out.hidden[i], hidden[-1], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(out.logits[i], logits[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_is_close(name: str) -> None:
    config, drafter = CONFIGS[name], make(name, torch.bfloat16)
    pairs = Pairs(drafter, 1)
    out = drafter.forward(pairs.input([chunk(config, 0, 1, 50)], [1]), pairs.kv)
    weights = ([(n, w.bfloat16().float()) for n, w in f(config)] for f in (random_weights, eagle_weights))
    _, _, tokens, hidden = chunk(config, 0, 1, 50)
    logits, states_ = expected(config, *weights, tokens, hidden.bfloat16().float(), 1)
    assert out.hidden.dtype == torch.bfloat16 and out.logits.dtype == torch.float32
    torch.testing.assert_close(out.hidden[0].float(), states_[-1], atol=6e-2, rtol=6e-2)
    torch.testing.assert_close(out.logits[0], logits[-1], atol=6e-2, rtol=6e-2)


def by_hand(
    drafter: NativeEagle, pairs: Pairs, chunks: list, visible: list[int], params: DraftParams
) -> list[dict[str, list]]:
    """Each sequence's draft by single forwards and the engine's sampler's noise."""
    drafts = []
    for i, first in enumerate(chunks):
        c, seq, at = first, first[0], first[1] + len(first[2])
        cumulative_acceptance = np.float32(1)
        rows: dict[str, list] = {"tokens": [], "gaps": [], "cumulative_acceptance": [], "logits": []}
        for step in range(max(1, int(params.max_len[i]))):
            out = drafter.forward(pairs.input([c], visible[i : i + 1]), pairs.kv)
            if step == params.max_len[i]:
                break
            scores = out.logits[0]
            if params.temperature[i] > 0:
                key = row_keys(params.keys[i : i + 1], params.output_positions[i : i + 1] + step)
                noise = gumbel_noise(torch.from_numpy(key.view(np.int64)), scores.shape[0])[0]
                scores = scores / float(params.temperature[i]) + noise
            best = scores.topk(max(2, params.topk))
            gaps = (best.values[0] - best.values).numpy()
            gaps[0] = gaps[1]
            rate = params.rates[min(step, DEPTHS - 1), min(BUCKETS - 1, int(gaps[0] / BUCKET_WIDTH))]
            cumulative_acceptance = cumulative_acceptance * rate
            if cumulative_acceptance < params.min_cumulative_acceptance:
                break
            rows["tokens"].append(best.indices[: params.topk].tolist())
            rows["gaps"].append(gaps[: params.topk])
            rows["cumulative_acceptance"].append(cumulative_acceptance)
            rows["logits"].append(out.logits[0].numpy())
            c = (seq, at + step, [int(best.indices[0])], out.hidden)
        drafts.append(rows)
    return drafts


def assert_same(rows: DraftRows, drafts: list[dict[str, list]]) -> None:
    for i, draft in enumerate(drafts):
        n = len(draft["tokens"])
        assert rows.lengths[i] == n
        assert rows.tokens[i, :n].tolist() == draft["tokens"]
        if n:
            np.testing.assert_allclose(rows.gaps[i, :n], draft["gaps"], atol=2e-5)
            np.testing.assert_allclose(
                rows.cumulative_acceptance[i, :n], draft["cumulative_acceptance"], rtol=1e-6
            )
            if rows.logits is not None:
                np.testing.assert_array_equal(rows.logits[i, :n], draft["logits"])


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_draft_equals_a_loop_of_forwards(name: str, dtype: torch.dtype, temperature: float) -> None:
    config, drafter = CONFIGS[name], make(name, dtype)
    spans = ((1, 40), (1, 510), (500, 512), (1, 2), (16, 31))
    visible = [1, 1, 500, 1, 16]
    chunks = [chunk(config, i, a, b) for i, (a, b) in enumerate(spans)]
    params = draft_params(5, [6, 8, 0, 3, 9], temperature, topk=3, want_logits=True)
    fast, slow = Pairs(drafter, 5, seed=1), Pairs(drafter, 5, seed=2)
    rows = drafter.draft(fast.input(chunks, visible), params, fast.kv)
    assert rows.tokens.shape == (5, 9, 3) and rows.logits is not None
    assert_same(rows, by_hand(drafter, slow, chunks, visible, params))
    # The drafted pairs were cached: all but the last token of each chain.
    size = slow.block_size
    for i, (_, end) in enumerate(spans):
        ends = end + max(0, int(params.max_len[i]) - 1)
        for p in range(visible[i], ends):
            a, b = (t.kv.data.view(2, t.kv.num_blocks, -1)[:, t.tables[i, p // size]] for t in (fast, slow))
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_pytorch_drafter_drafts_the_same(name: str) -> None:
    config, native = CONFIGS[name], make(name)
    policy = TorchDecoder(config)
    policy.load_weights(random_weights(config))
    other = TorchEagle(policy)
    other.load_weights(eagle_weights(config))
    rates = np.linspace(0.6, 1, DEPTHS * BUCKETS, dtype=np.float32).reshape(BUCKETS, DEPTHS).T.copy()
    params = draft_params(
        4, [5, 2, 6, 4], 0.9, topk=3, rates=rates, min_cumulative_acceptance=0.2, want_logits=True
    )
    chunks = [chunk(config, i, a, b) for i, (a, b) in enumerate(((1, 30), (9, 16), (1, 40), (20, 50)))]
    found = []
    for drafter in (native, other):
        pairs = Pairs(drafter, 4, 80)
        found.append(drafter.draft(pairs.input(chunks, [1, 9, 1, 20]), params, pairs.kv))
    a, b = found
    assert a.lengths.tolist() == b.lengths.tolist() and (a.tokens == b.tokens).all() and a.lengths.sum() > 4
    assert a.logits is not None and b.logits is not None
    for field in ("gaps", "cumulative_acceptance", "logits"):
        np.testing.assert_allclose(getattr(a, field), getattr(b, field), atol=1e-4)


def test_chains_stop_where_they_would_hardly_survive() -> None:
    config, drafter = CONFIGS["qwen2"], make("qwen2")
    generator = np.random.default_rng(0)
    rates = np.sort(generator.uniform(0.3, 1.0, (DEPTHS, BUCKETS)).astype(np.float32), axis=1)
    chunks = [chunk(config, i, 1, 5 + i) for i in range(12)]
    lengths = []
    for limit in (0.05, 0.3, 0.6, 0.95):
        params = draft_params(12, 12, topk=2, rates=rates, min_cumulative_acceptance=limit, want_logits=True)
        fast, slow = Pairs(drafter, 12, 64), Pairs(drafter, 12, 64)
        rows = drafter.draft(fast.input(chunks, [1] * 12), params, fast.kv)
        assert_same(rows, by_hand(drafter, slow, chunks, [1] * 12, params))
        valid = np.arange(12) < rows.lengths[:, None]
        assert (rows.cumulative_acceptance[valid] >= limit).all() and not rows.tokens[~valid].any()
        lengths.append(int(rows.lengths.sum()))
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[1] > lengths[2]


def test_rates_depend_on_depth_and_gap() -> None:
    """Survival is the product of the table's entries; depths beyond the table use its last row."""
    config, drafter = CONFIGS["qwen3"], make("qwen3")
    rates = (0.5 + np.arange(DEPTHS * BUCKETS) / 1000).astype(np.float32).reshape(DEPTHS, BUCKETS)
    pairs = Pairs(drafter, 1)
    params = draft_params(1, DEPTHS + 3, rates=rates)
    rows = drafter.draft(pairs.input([chunk(config, 0, 1, 9)], [1]), params, pairs.kv)
    cumulative_acceptance = np.float32(1)
    for step, gap in enumerate(rows.gaps[0, :, 0]):
        cumulative_acceptance *= rates[min(step, DEPTHS - 1), min(BUCKETS - 1, int(gap / BUCKET_WIDTH))]
        assert rows.cumulative_acceptance[0, step] == cumulative_acceptance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_draft_ignores_its_neighbours_and_the_threads(name: str, dtype: torch.dtype) -> None:
    config, count = CONFIGS[name], 21
    one, two = make(name, dtype), make(name, dtype, threads=2)
    chunks = [chunk(config, i, 1 + i // 2, 2 + 3 * i) for i in range(count)]
    visible = [1 + i // 2 for i in range(count)]
    lengths = [1 + i % 5 for i in range(count)]
    params = draft_params(count, lengths, 0.8, topk=2, want_logits=True)
    together = []
    for drafter, seed in ((one, 1), (two, 2)):
        pairs = Pairs(drafter, count, 96, seed=seed)
        together.append(drafter.draft(pairs.input(chunks, visible), params, pairs.kv))
    for i in range(count):
        pairs = Pairs(one, count, 96, seed=3)
        at = slice(i, i + 1)
        own = replace(params, keys=params.keys[at], output_positions=params.output_positions[at])
        own = replace(own, temperature=params.temperature[at], max_len=params.max_len[at])
        alone = one.draft(pairs.input(chunks[at], visible[at]), own, pairs.kv)
        n = lengths[i]
        for rows in together:
            for field in ("tokens", "gaps", "cumulative_acceptance", "logits"):
                np.testing.assert_array_equal(getattr(rows, field)[i, :n], getattr(alone, field)[0])
            assert rows.lengths[i] == alone.lengths[0] == n


def test_more_sequences_than_rows_at_once() -> None:
    """300 chains, of which some end early: every chunk of rows reads the right states."""
    config, drafter, count = CONFIGS["qwen3"], make("qwen3"), 300
    chunks = [chunk(config, i, 1, 2 + i % 3) for i in range(count)]
    lengths = [1 + (i * 7) % 4 for i in range(count)]
    params = draft_params(count, lengths)
    pairs = Pairs(drafter, count, 16, 16)
    rows = drafter.draft(pairs.input(chunks, [1] * count), params, pairs.kv)
    assert_same(rows, by_hand(drafter, pairs, chunks, [1] * count, params))


def test_sequences_that_end_with_a_chunk_of_rows() -> None:
    """Rows 100, 256, 257, 512 and 900 are the first ones of the next sequence: 256 are computed together."""
    config, drafter = CONFIGS["odd"], make("odd")
    chunks = [chunk(config, i, 1, 1 + n) for i, n in enumerate((100, 156, 1, 255, 388, 1))]
    params = draft_params(6, [3, 4, 2, 1, 4, 3], want_logits=True)
    fast, slow = Pairs(drafter, 6, seed=1), Pairs(drafter, 6, seed=2)
    rows = drafter.draft(fast.input(chunks, [1] * 6), params, fast.kv)
    assert_same(rows, by_hand(drafter, slow, chunks, [1] * 6, params))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [1, 2, 15, 16, 17, 40, 513, 520])
def test_nothing_before_the_first_visible_pair_is_read(first: int, dtype: torch.dtype) -> None:
    """Not even NaN there, nor in what was never written, shows."""
    config, drafter = CONFIGS["qwen2"], make("qwen2", dtype)
    results = []
    for fill in (0.0, float("nan")):
        pairs = Pairs(drafter, 1)
        pairs.kv.data.view(dtype).fill_(fill)
        content = pairs.input([chunk(config, 0, first, 522)], [first])
        results.append(drafter.draft(content, draft_params(1, 5, want_logits=True), pairs.kv))
    np.testing.assert_array_equal(results[0].tokens, results[1].tokens)
    np.testing.assert_array_equal(results[0].logits, results[1].logits)
    assert np.isfinite(results[0].logits).all()


def test_a_push_to_the_policy_shows_at_once() -> None:
    config, drafter = CONFIGS["llama"], make("llama")
    new = random_weights(config, seed=5)
    drafter.policy.load_weights(new)
    pairs = Pairs(drafter, 1)
    content = chunk(config, 0, 1, 20)
    out = drafter.forward(pairs.input([content], [1]), pairs.kv)
    logits, _ = expected(config, new, eagle_weights(config), *content[2:], 1)
    torch.testing.assert_close(out.logits[0], logits[-1], atol=1e-4, rtol=1e-4)


def test_weights_are_checked_and_replaced() -> None:
    config = CONFIGS["qwen2"]
    policy = NativeDecoder(config)
    drafter, weights = NativeEagle(policy), eagle_weights(config, seed=4)
    pairs = Pairs(drafter, 1)
    content = pairs.input([chunk(config, 0, 1, 20)], [1])
    for wrong in (
        weights[1:],
        [*weights, ("lm_head.weight", torch.zeros(1))],
        [("fc.weight", torch.zeros(1))],
    ):
        with pytest.raises(CheckpointError):
            drafter.load_weights(wrong)
    drafter.load_weights(eagle_weights(config, seed=9))
    with pytest.raises(BackendError, match="before its weights, or the policy's"):
        drafter.forward(content, pairs.kv)
    policy.load_weights(random_weights(config))
    drafter.load_weights(weights)
    out = drafter.forward(content, pairs.kv)
    logits, _ = expected(config, random_weights(config), weights, *chunk(config, 0, 1, 20)[2:], 1)
    torch.testing.assert_close(out.logits[0], logits[-1], atol=1e-4, rtol=1e-4)


def test_blocks_are_copied() -> None:
    config, drafter = CONFIGS["qwen2"], make("qwen2")
    pairs = Pairs(drafter, 2)
    drafter.forward(pairs.input([chunk(config, 0, 1, 70)], [1]), pairs.kv)
    drafter.copy_blocks(pairs.kv, pairs.tables[0].tolist(), pairs.tables[1].tolist())
    _, _, tokens, hidden = chunk(config, 0, 70, 71)
    both = pairs.input([(0, 70, tokens, hidden), (1, 70, tokens, hidden)], [1, 1])
    out = drafter.forward(both, pairs.kv)
    assert torch.equal(out.logits[0], out.logits[1])
    with pytest.raises(BackendError, match="copy_blocks"):
        drafter.copy_blocks(pairs.kv, [0], [pairs.kv.num_blocks])
    assert drafter.new_kv_cache(6, 32).nbytes == 6 * drafter.kv_bytes_per_block(32)


def test_positions_beyond_the_first_rotary_table() -> None:
    config = replace(CONFIGS["qwen3"], max_position_embeddings=9000)
    policy = NativeDecoder(config)
    policy.load_weights(random_weights(config))
    weights = eagle_weights(config)
    for draft in (False, True):
        drafter = NativeEagle(policy)
        drafter.load_weights(weights)
        pairs = Pairs(drafter, 1, longest=5000)
        _, _, tokens, hidden = chunk(config, 0, 80, 95)
        content = pairs.input([(0, 4080, tokens, hidden)], [4080])
        if draft:
            params = draft_params(1, 4, want_logits=True)
            assert drafter.draft(content, params, pairs.kv).lengths[0] == 4
        far = pairs.input([(0, 4095, [5], states(1, config, 9))], [4080])
        out = drafter.forward(content, pairs.kv), drafter.forward(far, pairs.kv)
        states_ = torch.cat([hidden, states(1, config, 9)])
        logits, _ = expected(config, random_weights(config), weights, [*tokens, 5], states_, 4080)
        torch.testing.assert_close(torch.cat([o.logits for o in out]), logits[-2:], atol=1e-3, rtol=1e-3)


def test_wrong_input_is_refused() -> None:
    config, drafter = CONFIGS["llama"], make("llama")
    pairs = Pairs(drafter, 1, longest=700, block_size=16)
    good = pairs.input([chunk(config, 0, 5, 9)], [5])
    for visible in (0, 6):
        with pytest.raises(BackendError, match="first visible"):
            drafter.forward(replace(good, first_visible=torch.tensor([visible], dtype=torch.int32)), pairs.kv)
    with pytest.raises(BackendError, match="hidden must be"):
        drafter.forward(replace(good, hidden=good.hidden.bfloat16()), pairs.kv)
    with pytest.raises(BackendError, match="hidden states of 63"):
        drafter.forward(replace(good, hidden=good.hidden[:, :63].contiguous()), pairs.kv)
    parents = torch.tensor([-1, 0, 1, 2], dtype=torch.int32)
    with pytest.raises(BackendError, match="parent"):
        drafter.forward(replace(good, batch=replace(good.batch, parents=parents)), pairs.kv)
    wrong_rates = draft_params(1, 2, rates=np.ones((DEPTHS, BUCKETS - 1), np.float32))
    with pytest.raises(BackendError, match="match rates"):
        drafter.draft(good, wrong_rates, pairs.kv)
    for topk in (0, 5):
        with pytest.raises(BackendError, match="1 to 4"):
            drafter.draft(good, draft_params(1, 2, topk=topk), pairs.kv)
    with pytest.raises(BackendError, match="the input has 1"):
        drafter.draft(good, draft_params(2, 2), pairs.kv)
    rows = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(BackendError, match="logit row"):
        drafter.draft(replace(good, batch=replace(good.batch, logit_rows=rows)), draft_params(1, 2), pairs.kv)
    end = pairs.input([chunk(config, 0, 690, 699)], [690])
    assert drafter.draft(end, draft_params(1, 2), pairs.kv).lengths[0] == 2
    with pytest.raises(BackendError, match="position"):
        drafter.draft(end, draft_params(1, 3), pairs.kv)
    short = replace(good, batch=replace(good.batch, block_tables=good.batch.block_tables[:, :1].contiguous()))
    assert drafter.draft(short, draft_params(1, 8), pairs.kv).lengths[0] == 8
    with pytest.raises(BackendError, match="block table"):
        drafter.draft(short, draft_params(1, 9), pairs.kv)


RANK = """
import sys, numpy as np, torch, torch.distributed as dist
from megatron_tlt.distributed.tensor_parallel import GroupTensorParallel
from tests.unit.models.native.test_eagle import *
rank, size, file, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=size)
tp = GroupTensorParallel(dist.group.WORLD)
config = CONFIGS[name]
chunks = [chunk(config, i, 1, 3 + 4 * i) for i in range(5)]
rates = np.linspace(0.6, 1, DEPTHS * BUCKETS, dtype=np.float32).reshape(BUCKETS, DEPTHS).T.copy()
params = draft_params(5, [4, 0, 7, 1, 6], 0.9, topk=2, rates=rates, min_cumulative_acceptance=0.1, want_logits=True)
def run(tp):
    drafter = make(name, tp=tp)
    pairs = Pairs(drafter, 5, 64)
    content = pairs.input(chunks, [1] * 5)
    return drafter.forward(content, pairs.kv), drafter.draft(content, params, pairs.kv)
(out, rows), (want, alone) = run(tp), run(None)
torch.testing.assert_close(out.logits, want.logits, atol=1e-5, rtol=1e-5)
torch.testing.assert_close(out.hidden, want.hidden, atol=1e-5, rtol=1e-5)
assert rows.lengths.tolist() == alone.lengths.tolist() and rows.lengths.sum() > 8, rows.lengths
assert (rows.tokens == alone.tokens).all()
np.testing.assert_allclose(rows.gaps, alone.gaps, atol=1e-4)
np.testing.assert_allclose(rows.cumulative_acceptance, alone.cumulative_acceptance, atol=1e-5)
np.testing.assert_allclose(rows.logits, alone.logits, atol=1e-4)
"""


def test_tensor_parallel_over_processes(tmp_path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [subprocess.Popen([*command, str(r), "2", str(tmp_path / "store"), "qwen2"]) for r in range(2)]
    assert [p.wait(timeout=120) for p in ranks] == [0] * 2
