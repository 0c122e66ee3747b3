"""Both rollout forms of the drafter: the paged forward is the training forward, drafts are what a plain loop drafts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from megatron_tlt.drafter.batching import collate
from megatron_tlt.errors import BackendError, CheckpointError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.base import BUCKETS, DEPTHS, DraftParams, EagleDecoder, EagleInput
from megatron_tlt.models.eagle.model import EagleModel
from megatron_tlt.models.eagle.pairs import PairLayout
from megatron_tlt.models.factory import build_decoder, build_eagle
from megatron_tlt.models.inputs import DecoderInput
from megatron_tlt.models.keys import request_key, row_keys
from megatron_tlt.rollout.sampler import Sampler, SamplingRows, gumbel_noise
from tests.helpers.tiny_drafters import FAMILIES, random_drafter, random_sequence
from tests.helpers.tiny_models import random_weights
from tests.unit.models.test_decoders import LocalGroup

SIZE = 16
both = pytest.mark.parametrize("kernels", ["native", "torch"])


def loaded(config: ModelConfig, kernels: str = "torch", tp=None) -> EagleDecoder:
    policy = build_decoder(config, kernels=kernels, tp=tp)
    policy.load_weights(random_weights(config))
    eagle = build_eagle(policy, 1, tp)
    assert eagle.kind == kernels
    eagle.load_weights(random_drafter(config).items())
    return eagle


def tables_of(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    weights = dict(random_weights(config))
    return weights["model.embed_tokens.weight"], weights["lm_head.weight"]


@dataclass
class Feeder:
    """Feeds pairs of sequences (tokens, hidden states) over shuffled blocks."""

    eagle: EagleDecoder
    sequences: list
    blocks: int = 24
    tables: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kv = self.eagle.new_kv_cache(self.blocks, SIZE)
        order = torch.randperm(self.blocks, generator=torch.Generator().manual_seed(1)).tolist()
        for s in self.sequences:
            self.tables.append([order.pop() for _ in range(-(-(s.length + 10) // SIZE))])

    def pairs(self, spans: list[tuple[int, int, int]], visible: int = 1) -> EagleInput:
        """spans: (sequence, first position, end position)."""
        tokens, positions, slots, starts, hidden = [], [], [], [0], []
        for i, a, b in spans:
            s, table = self.sequences[i], self.tables[i]
            tokens += s.token_ids[a:b].tolist()
            positions += range(a, b)
            slots += [table[p // SIZE] * SIZE + p % SIZE for p in range(a, b)]
            hidden.append(s.hidden[a - 1 : b - 1])
            starts.append(starts[-1] + b - a)
        chosen = [self.tables[i] for i, _, _ in spans]
        width = max(map(len, chosen))
        padded = [t + [0] * (width - len(t)) for t in chosen]
        ends = [b for _, _, b in spans]
        data = (tokens, positions, slots, starts, ends, padded, [e - 1 for e in starts[1:]])
        batch = DecoderInput(*(torch.tensor(x, dtype=torch.int32) for x in data))
        first = torch.full((len(spans),), visible, dtype=torch.int32)
        return EagleInput(batch, torch.cat(hidden), first)


def params(count: int, longest: list[int], topk: int = 1, **more) -> DraftParams:
    # flat in the gap: a chain's cumulative acceptance depends on nothing but its length
    rates = np.linspace(0.95, 0.6, DEPTHS, dtype=np.float32)[:, None].repeat(BUCKETS, 1)
    fields = {
        "keys": np.array([request_key(3, 11 + i, i) for i in range(count)], np.uint64),
        "output_positions": np.arange(count, dtype=np.int32) * 5,
        "temperature": np.array([1.0, 0.0, 0.7, 1.0][:count], np.float32),
        "max_len": np.array(longest, np.int32),
        "topk": topk,
        "rates": rates,
        "min_cumulative_acceptance": 0.0,
    }
    return DraftParams(**(fields | more))


@both
@pytest.mark.parametrize("family", FAMILIES)
def test_the_paged_forward_is_the_training_forward(kernels: str, family: str) -> None:
    """In chunks of any size, last rows compared with step 0 of `EagleModel.unroll`."""
    config = FAMILIES[family]
    sequences = [random_sequence(config, n, 2, seed=n) for n in (40, 22)]
    eagle = loaded(config, kernels)
    feeder = Feeder(eagle, sequences)
    model = EagleModel(config)
    model.load_full(random_drafter(config).items())
    embed, head = tables_of(config)
    for chunks in ([(0, 1, 18)], [(0, 18, 19), (1, 1, 2)], [(1, 2, 21), (0, 19, 39)]):
        out = eagle.forward(feeder.pairs(chunks), feeder.kv)
        for row, (i, _, end) in enumerate(chunks):
            batch = collate([sequences[i]])
            layout = PairLayout(batch)
            with torch.no_grad():
                want = model.unroll(embed, batch, layout, 1)[0]
            at = layout.bases.tolist().index(end - 1)
            torch.testing.assert_close(out.hidden[row], want[at], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(out.logits[row], want[at] @ head.T, atol=1e-4, rtol=1e-4)


@both
def test_pairs_before_the_first_visible_one_are_not_read(kernels: str) -> None:
    config = FAMILIES["qwen3"]
    s = random_sequence(config, 40, 2)
    eagle = loaded(config, kernels)
    feeder = Feeder(eagle, [s])
    eagle.forward(feeder.pairs([(0, 1, 25)]), feeder.kv)
    late = eagle.forward(feeder.pairs([(0, 25, 30)], visible=25), feeder.kv).logits
    fresh = Feeder(eagle, [s])
    assert torch.equal(late, eagle.forward(fresh.pairs([(0, 25, 30)], visible=25), fresh.kv).logits)
    full = eagle.forward(feeder.pairs([(0, 25, 30)]), feeder.kv).logits
    assert not torch.allclose(late, full, atol=1e-3)


@both
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("topk", [1, 3])
def test_drafts_are_what_a_plain_loop_drafts(kernels: str, family: str, topk: int) -> None:
    config = FAMILIES[family]
    sequences = [random_sequence(config, n, 2, seed=n) for n in (21, 33, 16, 18)]
    eagle = loaded(config, kernels)
    feeder = Feeder(eagle, sequences)
    eagle.forward(feeder.pairs([(i, 1, s.length - 3) for i, s in enumerate(sequences)]), feeder.kv)
    last = feeder.pairs([(i, s.length - 3, s.length) for i, s in enumerate(sequences)])
    lengths = [4, 6, 0, 2]
    wanted = params(4, lengths, topk, want_logits=True)
    rows = eagle.draft(last, wanted, feeder.kv)
    assert rows.lengths.tolist() == lengths
    assert rows.tokens.shape == rows.gaps.shape == (4, 6, topk)
    for i in range(4):
        check_chain(eagle, sequences[i], rows, wanted, i)


def check_chain(eagle: EagleDecoder, s, rows, wanted: DraftParams, i: int) -> None:
    """Feeds the drafted tokens one by one to a fresh cache and compares with the keyed sampler's choice."""
    drafted = rows.tokens[i, : rows.lengths[i], 0].tolist()
    feeder = Feeder(eagle, [s])
    out = eagle.forward(feeder.pairs([(0, 1, s.length)]), feeder.kv)
    cumulative_acceptance = 1.0
    for step, token in enumerate(drafted):
        torch.testing.assert_close(
            torch.from_numpy(rows.logits[i, step]), out.logits[0], atol=1e-4, rtol=1e-4
        )
        assert token == sampled(out.logits, wanted, i, step)
        best = perturbed(out.logits[0], wanted, i, step).topk(max(2, wanted.topk))
        assert rows.tokens[i, step].tolist() == best.indices[: wanted.topk].tolist()
        expected = (best.values[0] - best.values[1:]).tolist()
        expected = [expected[0], *expected[: wanted.topk - 1]]
        np.testing.assert_allclose(rows.gaps[i, step], expected, atol=2e-4)
        cumulative_acceptance *= float(wanted.rates[min(step, DEPTHS - 1), 0])
        assert rows.cumulative_acceptance[i, step] == pytest.approx(cumulative_acceptance, rel=1e-5)
        s.token_ids = torch.cat([s.token_ids, torch.tensor([token])])
        s.hidden = torch.cat([s.hidden, out.hidden])
        out = eagle.forward(feeder.pairs([(0, s.length - 1, s.length)]), feeder.kv)


def sampled(logits: torch.Tensor, wanted: DraftParams, i: int, step: int) -> int:
    """The token that the rollout's sampler would draw from the drafter's logits."""
    at = slice(i, i + 1)
    key = row_keys(wanted.keys[at], wanted.output_positions[at] + step)
    none = np.zeros(1, np.int32)
    rows = SamplingRows(key, wanted.temperature[at], none, np.ones(1), np.zeros(1, np.float32), False)
    return int(Sampler(torch.device("cpu")).sample(logits, rows)[0])


def perturbed(logits: torch.Tensor, wanted: DraftParams, i: int, step: int) -> torch.Tensor:
    t = float(wanted.temperature[i])
    if t == 0:
        return logits
    key = row_keys(wanted.keys[i : i + 1], wanted.output_positions[i : i + 1] + step)
    return logits / t + gumbel_noise(torch.from_numpy(key.view(np.int64)), len(logits))[0]


@both
def test_chains_end_where_cumulative_acceptance_falls_too_low(kernels: str) -> None:
    config = FAMILIES["qwen3"]
    s = random_sequence(config, 20, 2)
    eagle = loaded(config, kernels)
    feeder = Feeder(eagle, [s, s])
    inputs = feeder.pairs([(0, 1, 20), (1, 1, 20)])
    free = eagle.draft(inputs, params(2, [8, 8]), feeder.kv)
    cut = float(free.cumulative_acceptance[0, 3])
    rows = eagle.draft(inputs, params(2, [8, 8], min_cumulative_acceptance=cut), feeder.kv)
    assert rows.lengths.tolist() == [4, 4]
    assert np.array_equal(rows.tokens[:, :4], free.tokens[:, :4])
    assert eagle.draft(
        inputs, params(2, [8, 8], min_cumulative_acceptance=0.99), feeder.kv
    ).lengths.tolist() == [0, 0]


@both
def test_rates_are_looked_up_by_depth_and_gap(kernels: str) -> None:
    config = FAMILIES["qwen3"]
    s = random_sequence(config, 20, 2)
    eagle = loaded(config, kernels)
    feeder = Feeder(eagle, [s])
    rates = np.arange(DEPTHS * BUCKETS, dtype=np.float32).reshape(DEPTHS, BUCKETS) / (DEPTHS * BUCKETS)
    rows = eagle.draft(feeder.pairs([(0, 1, 20)]), params(1, [10], rates=rates), feeder.kv)
    cumulative_acceptance = 1.0
    for step in range(10):
        bucket = min(BUCKETS - 1, int(rows.gaps[0, step, 0] // 0.25))
        cumulative_acceptance *= rates[min(step, DEPTHS - 1), bucket]
        assert rows.cumulative_acceptance[0, step] == pytest.approx(cumulative_acceptance, rel=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_ranks_draft_what_one_rank_drafts(size: int) -> None:
    """4 ranks on 2 kv heads: heads are replicated."""
    config = FAMILIES["qwen2"]

    class Group(LocalGroup):
        def member(self, rank: int):
            member = super().member(rank)
            member.broadcast = lambda tensor: tensor.copy_(member.all_gather(tensor.clone())[0])
            return member

    def run(tp):
        eagle = loaded(config, tp=tp)
        sequences = [random_sequence(config, n, 2, seed=n) for n in (21, 33)]
        feeder = Feeder(eagle, sequences)
        return eagle.draft(feeder.pairs([(0, 1, 21), (1, 1, 33)]), params(2, [5, 3], 2), feeder.kv)

    group, got = Group(size), [None] * size
    ranks = [
        threading.Thread(target=lambda r: got.__setitem__(r, run(group.member(r))), args=(r,))
        for r in range(size)
    ]
    [t.start() for t in ranks]
    [t.join() for t in ranks]
    want = run(None)
    for rows in got:
        assert np.array_equal(rows.tokens, want.tokens)
        np.testing.assert_allclose(rows.gaps, want.gaps, atol=1e-3)


@both
def test_copied_blocks_serve_another_sequence(kernels: str) -> None:
    config = FAMILIES["qwen3"]
    s = random_sequence(config, 40, 2)
    eagle = loaded(config, kernels)
    feeder = Feeder(eagle, [s, s])
    eagle.forward(feeder.pairs([(0, 1, 30)]), feeder.kv)
    eagle.copy_blocks(feeder.kv, feeder.tables[0], feeder.tables[1])
    out = eagle.forward(feeder.pairs([(0, 30, 33), (1, 30, 33)]), feeder.kv)
    assert torch.equal(out.logits[0], out.logits[1])


@both
def test_what_a_drafter_refuses(kernels: str) -> None:
    config = FAMILIES["qwen3"]
    eagle = build_eagle(build_decoder(config, kernels=kernels))
    s = random_sequence(config, 10, 2)
    feeder = Feeder(eagle, [s])
    with pytest.raises(BackendError, match="before its weights"):
        eagle.forward(feeder.pairs([(0, 1, 5)]), feeder.kv)
    weights = random_drafter(config)
    weights.pop("fc.weight")
    with pytest.raises(CheckpointError, match=r"fc\.weight is missing"):
        eagle.load_weights(weights.items())
    scratch = 1 if kernels == "torch" else 0
    assert feeder.kv.nbytes == (feeder.blocks + scratch) * eagle.kv_bytes_per_block(SIZE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_batch", [3, 8])
def test_static_steps_draft_the_same(family: str, max_batch: int) -> None:
    """In fixed buffers with padding, steps run twice; a draft that does not fit runs as before."""
    config = FAMILIES[family]
    sequences = [random_sequence(config, n, 2, seed=n) for n in (21, 40, 16)]
    lengths, ran = [3, 7, 0], []

    def run_step(key, step) -> None:
        ran.append(key)
        step()
        step()

    def run(static: bool):
        eagle = loaded(config)
        feeder = Feeder(eagle, sequences)
        if static:
            eagle.use_graphs(feeder.kv, run_step, max_batch, 64)
        eagle.forward(feeder.pairs([(i, 1, s.length - 2) for i, s in enumerate(sequences)]), feeder.kv)
        last = feeder.pairs([(i, s.length - 2, s.length) for i, s in enumerate(sequences)], visible=4)
        rows = eagle.draft(last, params(3, lengths, 2, want_logits=True), feeder.kv)
        twice = eagle.draft(feeder.pairs([(1, 38, 40)]), params(1, [6], 2), feeder.kv)
        far = eagle.draft(feeder.pairs([(1, 38, 40)] * 4), params(4, [2] * 4, 2), feeder.kv)
        return [rows, twice, far]

    for got, want in zip(run(True), run(False), strict=True):
        assert got.lengths.tolist() == want.lengths.tolist()
        assert np.array_equal(got.tokens, want.tokens)
        np.testing.assert_allclose(got.gaps, want.gaps, atol=1e-3)
        np.testing.assert_allclose(got.cumulative_acceptance, want.cumulative_acceptance, rtol=1e-5)
        if want.logits is not None:
            np.testing.assert_allclose(got.logits, want.logits, atol=1e-4)
    batches = [key[1] for key in ran]
    assert batches[:6] == [2] * 6 and batches[6:11] == [1] * 5
    assert len(batches) == 11 + (max_batch >= 4)
    assert {key[2] for key in ran} == {4}
