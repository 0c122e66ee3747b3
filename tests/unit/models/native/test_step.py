"""A step in one C call gives what the single calls give, bit for bit: the two paths of `ModelRunner` side by side."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_tlt.distributed.tensor_parallel import SingleRank
from megatron_tlt.errors import BackendError
from megatron_tlt.models.base import KVCache
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.native.decoder import NativeDecoder, keyed_sample
from megatron_tlt.models.native.step import NativeStep, RowArrays
from megatron_tlt.rollout.batch import Batch, StepResult
from megatron_tlt.rollout.model_runner import ModelRunner
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.sampler import Sampler
from megatron_tlt.rollout.spec.draft import Draft
from tests.helpers.tiny_models import Driver, moe_config, random_weights
from tests.helpers.trees import Tree, slot, trunk_tree

V = 3  # so few that random drafts are right now and then
CONFIGS = {
    "qwen3": ModelConfig("qwen3", V, 64, 2, 4, 4, 24, 90, qk_norm=True, tie_word_embeddings=True),
    "experts": moe_config("qwen3_moe", V),
    "qwen2": ModelConfig("qwen2", V, 96, 2, 6, 2, 32, 200, qkv_bias=True, tie_word_embeddings=True),
}
CONTEXTS = (3, 15, 30, 31, 64, 100)  # drafts straddle tiles (16) and blocks (32)
MOST_NODES = 24


@dataclass
class Bench:
    """One decoder, rows with cached contexts, and the cache as it is before each step."""

    decoder: NativeDecoder
    rows: RunningRows
    kv: KVCache
    before: Tensor

    def runner(self) -> ModelRunner:
        sampler = Sampler(torch.device("cpu"), partial(keyed_sample, threads=self.decoder.threads))
        has_experts = self.decoder.config.num_experts > 0
        fixed = self.rows, self.kv.block_size, sampler, SingleRank()
        runner = ModelRunner(self.decoder, self.kv, *fixed)
        if has_experts:
            runner.record_routes()
        runner.keep_pages()
        return runner

    def step(self, draft: Draft | None, count: int, in_one: bool) -> tuple:
        """Everything a step leaves behind, from the same cache."""
        runner = self.runner()
        if not in_one:
            runner.native_step = None
        self.kv.data.copy_(self.before)
        if draft is None:
            result: StepResult = runner.forward(Batch(count))
            verdict = ()
        else:
            result = runner.verify(draft)
            accepted = result.accepted
            assert result.counts is not None and accepted is not None
            parts = (result.counts, accepted.counts, accepted.index, accepted.accepted, accepted.reached)
            assert [p.dtype for p in parts] == [np.int32] * 3 + [bool] * 2
            verdict = tuple(p.tolist() for p in parts)
        assert result.tokens.dtype == np.int32 and result.logprobs.dtype == np.float32
        routes = [runner._routes.data] if runner._routes is not None else []
        cached = self.kv.data.clone(), runner.pages.data, *routes
        return result.tokens.tolist(), result.logprobs.tolist(), verdict, cached


def bench(name: str, threads: int = 1, seed: int = 0) -> Bench:
    decoder = NativeDecoder(CONFIGS[name], threads)
    decoder.load_weights(random_weights(CONFIGS[name]))
    driver, rng = Driver(decoder, num_blocks=60, block_size=32, seed=seed), random.Random(seed)
    driver.step([(i, [rng.randrange(V) for _ in range(n)]) for i, n in enumerate(CONTEXTS)], all_rows=False)
    rows = RunningRows(len(CONTEXTS), 256, 8, V)
    for i, context in enumerate(CONTEXTS):
        rows.slot_mapping[i] = slot(driver, i, context)
        slot(driver, i, context + MOST_NODES)
        rows.block_tables[i, : len(driver.tables[i])] = driver.tables[i]
        rows.positions[i], rows.context_lens[i] = context, context + 1
        rows.token_ids[i], rows.output_len[i] = rng.randrange(V), rng.randrange(1, 50)
        rows.keys[i] = rng.randrange(1 << 64)
        rows.temperature[i] = rng.choice([0.0, 0.3, 1.0])
    return Bench(decoder, rows, driver.kv, driver.kv.data.clone())


def random_draft(rng: random.Random, count: int, tree: bool) -> Draft:
    """Some rows may have no node."""
    made = []
    for _ in range(count):
        trunk = rng.choice([0, 1, 3, 6])
        others = rng.randrange(8) if tree and trunk else 0
        made.append(trunk_tree(rng, trunk, others, V) if not others else spread(rng, trunk, others))
    nodes = [(t, d, p - 1) for m in made for t, d, p in zip(m.tokens[1:], m.depths[1:], m.parents[1:])]
    columns = [np.array(c, np.int32) for c in zip(*nodes)] or [np.empty(0, np.int32)] * 3
    counts = np.array([len(m.tokens) - 1 for m in made], np.int32)
    cumulative_acceptance = np.ones(len(nodes), np.float32)
    return Draft(counts, columns[0], cumulative_acceptance, columns[1], columns[2] if tree else None)


def spread(rng: random.Random, trunk: int, others: int) -> Tree:
    """As `trunk_tree`, but siblings may hold equal tokens: the first of them counts."""
    tree = Tree([0], [-1])
    for i in range(trunk + others):
        tree.parents.append(i if i < trunk else rng.randrange(len(tree.tokens)))
        tree.tokens.append(rng.randrange(V))
    return tree


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_single_calls(name: str, threads: int) -> None:
    made, rng = bench(name, threads), random.Random(threads)
    accepted = moved = 0
    for turn in range(24):
        count = rng.randint(1, len(CONTEXTS))
        draft = None if turn % 8 == 7 else random_draft(rng, count, tree=turn % 2 == 0)
        made.rows.keys[0] = turn
        got, want = (made.step(draft, count, in_one) for in_one in (True, False))
        assert got[:-1] == want[:-1]
        assert all(map(torch.equal, got[-1], want[-1]))
        if draft is not None:
            accepted += sum(got[2][3])
            laid = np.array(got[2][2]) - np.repeat(np.cumsum(draft.counts + 1) - draft.counts - 1, got[2][0])
            within = np.concatenate([np.arange(n) for n in got[2][0]])
            moved += int((laid != within).sum())
    assert accepted > 20 and moved > 3


def test_many_steps_of_changing_size_share_the_buffers() -> None:
    """Results stay what they were when later steps overwrite or replace the buffers."""
    made, rng = bench("qwen2"), random.Random(5)
    runner, kept = made.runner(), []
    for _ in range(12):
        draft = random_draft(rng, rng.randint(1, 6), tree=rng.random() < 0.5)
        made.kv.data.copy_(made.before)
        kept.append((draft, runner.verify(draft)))
    for draft, result in kept:
        accepted = result.accepted
        tokens, logprobs, verdict, _ = made.step(draft, 0, False)
        assert (result.tokens.tolist(), result.logprobs.tolist()) == (tokens, logprobs)
        assert (accepted.accepted.tolist(), accepted.reached.tolist()) == verdict[3:]


BREAKS = [
    ("token_ids", 1, V, "token id"),
    ("draft.tokens", -1, -1, "token id"),
    ("block_tables", (1, CONTEXTS[1] // 32), 60, "slot outside"),
    ("block_tables", (5, 0), -1, "block table"),
    ("positions", 0, -1, "position outside"),
    ("positions", 0, 8 * 32 - 2, "block table"),
    ("draft.parents", 0, 0, "parent"),
    ("draft.counts", -1, 6, "shape"),
    ("draft.counts", -1, 4, "shape"),
    ("draft.counts", slice(0, 2), (-1, 11), "shape"),
]


@pytest.mark.parametrize(("array", "at", "value", "error"), BREAKS)
def test_what_c_could_not_read_safely_is_refused(array: str, at, value, error: str) -> None:
    made = bench("qwen3")
    tree = spread(random.Random(3), 3, 2)
    nodes = np.array([(t, d, p - 1) for t, d, p in zip(tree.tokens, tree.depths, tree.parents)][1:], np.int32)
    tokens, depths, parents = np.tile(nodes, (6, 1)).T.copy()
    draft = Draft(np.full(6, len(nodes), np.int32), tokens, tokens.astype(np.float32), depths, parents)
    runner = made.runner()
    runner.verify(draft)
    made.kv.data.copy_(made.before)
    owner = draft if array.startswith("draft.") else made.rows
    getattr(owner, array.removeprefix("draft."))[at] = value
    with pytest.raises(BackendError, match=f"native step refused: .*{error}"):
        runner.verify(draft)
    assert torch.equal(made.kv.data, made.before)


def test_rows_that_c_cannot_read_and_missing_weights_are_refused() -> None:
    decoder = NativeDecoder(CONFIGS["qwen3"])
    kv, rows = decoder.new_kv_cache(4, 16), RunningRows(2, 8, 2, V)
    fields = [rows.token_ids, rows.positions, rows.output_len, rows.block_tables, rows.keys, rows.temperature]
    with pytest.raises(BackendError, match="weights"):
        NativeStep(decoder, kv, RowArrays(*fields)).decode(1)
    for at, wrong in (
        (0, rows.token_ids.astype(np.int64)),
        (3, rows.block_tables[:, :1]),
        (4, rows.positions),
    ):
        with pytest.raises(BackendError, match="must be contiguous"):
            NativeStep(decoder, kv, RowArrays(*fields[:at], wrong, *fields[at + 1 :]))
    decoder.load_weights(random_weights(CONFIGS["qwen3"]))
    with pytest.raises(BackendError, match="3 rows, there are 2"):
        NativeStep(decoder, kv, RowArrays(*fields)).decode(3)


def test_pages_that_c_cannot_write_are_refused() -> None:
    made = bench("qwen3")
    runner, slots = made.runner(), 60 * 32
    for wrong in (
        torch.zeros(slots, 64, dtype=torch.bfloat16),
        torch.zeros(slots - 1, 64),
        torch.zeros(slots, 65),
        torch.zeros(64, slots).T,
    ):
        with pytest.raises(BackendError, match="hidden states"):
            runner.native_step.write_hidden_to(wrong)


def test_dropped_pages_are_written_no_more() -> None:
    made = bench("qwen3")
    runner = made.runner()
    pages = runner.keep_pages()
    runner.forward(Batch(3))
    written = pages.data.clone()
    assert int((written != 0).any(1).sum()) == 3
    runner.drop_pages()
    made.rows.slot_mapping[:3] += 1
    made.rows.positions[:3] += 1
    runner.forward(Batch(3))
    assert torch.equal(pages.data, written) and runner.pages is None
