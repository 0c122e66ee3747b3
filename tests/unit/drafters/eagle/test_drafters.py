"""Both forms of the drafter in rollouts draft what a few lines of plain PyTorch draft."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_tlt.drafters.decoder import BUCKETS, POSITIONS, DrafterDecoder
from megatron_tlt.drafters.eagle.config import Eagle3Config, EagleConfig
from megatron_tlt.drafters.model import DrafterConfig
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.errors import BackendError, CheckpointError, ConfigError
from megatron_tlt.models.decoders import keyed_noise
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.models.decoders.factory import build_decoder
from megatron_tlt.models.hf.config import ModelConfig
from tests.helpers.pairs import Rows, check_row, noted_waits, of_row, rows_of
from tests.helpers.thread_ranks import ThreadRank, on_ranks
from tests.helpers.tiny_drafters import random_drafter
from tests.helpers.tiny_models import random_weights


def drafter_config(config: ModelConfig) -> DrafterConfig:
    """Policies of five layers have a drafter of kind eagle3: of a reduced vocabulary, or with the norm first. Of kind
    eagle, those of three layers have a reduced vocabulary.
    """
    if config.num_layers < 5:
        return EagleConfig.of(config, 50 if config.num_layers == 3 else None)
    if config.qkv_bias:
        return Eagle3Config.of(config, (0, 1, 3), norm_before_residual=True)
    layer = replace(config, num_kv_heads=4, intermediate_size=72, rope_theta=500.0, rms_norm_eps=1e-3)
    return Eagle3Config.of(config, (1, 2, 3), 60, layer)


def eagle_weights(config: ModelConfig, seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    return list(random_drafter(drafter_config(config), seed).items())


both = pytest.mark.parametrize("kernels", ["native", "torch"])
CONFIGS = {
    "qwen2": ModelConfig("qwen2", 131, 96, 2, 6, 2, 32, 200, qkv_bias=True, tie_word_embeddings=True),
    "qwen3": ModelConfig("qwen3", 77, 68, 2, 4, 4, 24, 90, qk_norm=True, tie_word_embeddings=True),
    # 72 columns of queries: keys begin in the middle of a panel of weights
    "odd": ModelConfig("qwen2", 73, 72, 1, 3, 3, 24, 90, qkv_bias=True, tie_word_embeddings=True),
    "llama": ModelConfig("llama", 4200, 64, 1, 8, 1, 64, 96, max_position_embeddings=700),
    "reduced": ModelConfig("llama", 90, 64, 3, 8, 1, 64, 96, max_position_embeddings=700),
    "reduced tied": ModelConfig("qwen2", 91, 72, 3, 3, 3, 24, 90, qkv_bias=True, tie_word_embeddings=True),
    "eagle3": ModelConfig("qwen3", 83, 68, 5, 4, 2, 24, 90, qk_norm=True, tie_word_embeddings=True),
    "eagle3-norm": ModelConfig("qwen2", 79, 72, 5, 3, 3, 24, 90, qkv_bias=True),
}


def loaded(
    name: str, kernels: str = "native", dtype: torch.dtype = torch.float32, threads: int = 1, tp=None
) -> DrafterDecoder:
    drafter = drafter_config(CONFIGS[name])
    policy = build_decoder(CONFIGS[name], dtype=dtype, kernels=kernels, tp=tp, aux_layers=drafter.aux_layers)
    policy.load_weights(random_weights(CONFIGS[name]))
    eagle = KINDS[drafter.kind].build_decoder(policy, drafter, threads)
    assert eagle.kind == kernels
    eagle.load_weights(eagle_weights(CONFIGS[name]))
    return eagle


def check(drafted: Draft, rows: Rows, name: str, **more) -> None:
    for row in range(len(rows.tokens)):
        check_row(drafted, rows, row, random_weights(CONFIGS[name]), eagle_weights(CONFIGS[name]), **more)


def assert_same(a: Draft, b: Draft) -> None:
    for name in ("counts", "tokens", "cumulative_acceptance", "feature"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


@both
@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_equal_plain_pytorch(kernels: str, name: str) -> None:
    """Prompts fed before, in pieces or not at all; rows without a draft; drafts across blocks; greedy rows."""
    rows = rows_of(loaded(name, kernels), [40, 515, 3, 2, 18], temperature=[1.0, 0.7, 0.0, 1.0, 0.0])
    rows.feed(0, 1, 20)
    rows.feed(1, 1, 500)
    rows.feed(1, 500, 510)
    rates = np.linspace(0.95, 0.6, POSITIONS * BUCKETS, dtype=np.float32).reshape(POSITIONS, BUCKETS)
    drafted = rows.draft([9, 5, 3, 0, 4], rates)
    assert drafted.counts.tolist() == [9, 5, 3, 0, 4]
    check(drafted, rows, name, rates=rates)
    assert rows.draft(3).counts.tolist() == [0, 0, 0, 3, 0]  # the others have no new pair


@both
@pytest.mark.parametrize("name", ["reduced", "reduced tied"])
def test_a_reduced_vocabulary_follows_the_policys_head(kernels: str, name: str) -> None:
    """A weight sync replaces the head whose rows the drafter has copied."""
    eagle = loaded(name, kernels)
    before = rows_of(eagle, [40, 18]).draft(6)
    synced = [(n, t.flip(0) if t.shape[0] == CONFIGS[name].vocab_size else t) for n, t in random_weights(CONFIGS[name])]
    eagle.policy.load_weights(synced)
    rows = rows_of(eagle, [40, 18])
    drafted = rows.draft(6)
    for row in range(2):
        check_row(drafted, rows, row, synced, eagle_weights(CONFIGS[name]))
    assert drafted.tokens.tolist() != before.tokens.tolist()


def test_noise_is_made_for_the_drafters_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the logits are: 50 of the policy's 90. The C form's memory shows that its scores are as few."""
    made, real = list[tuple[int, ...]](), keyed_noise.gumbel_noise
    noted = lambda *given: (made.append((noise := real(*given)).shape), noise)[1]  # noqa: E731
    monkeypatch.setattr(keyed_noise, "gumbel_noise", noted)
    rows_of(loaded("reduced", "torch"), [40, 18]).draft(3)
    assert made == [(2, 50)] * 3
    monkeypatch.setitem(CONFIGS, "of many", replace(CONFIGS["reduced"], vocab_size=9000))
    few, many = (rows_of(loaded(name), [40, 18]) for name in ("reduced", "of many"))
    assert few.draft(3).counts.tolist() == many.draft(3).counts.tolist() == [3, 3]
    assert len(few.drafts._scratch) == len(many.drafts._scratch)


@pytest.mark.parametrize("steps", [2, 9])
def test_a_draft_waits_for_the_device_once(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its length; the catch-up does not wait at all."""
    rows = rows_of(loaded("qwen2", "torch"), [40, 18])
    waits = noted_waits(monkeypatch)
    assert rows.draft(steps).counts.tolist() == [steps, steps]
    assert waits == ["cpu"]


@pytest.mark.parametrize("name", ["qwen2", "eagle3"])
def test_steps_that_no_chain_can_reach_are_not_taken(name: str) -> None:
    """With rates of a half, four tokens in a row are 1/16 likely: a limit of 0.1 ends every chain at the third."""
    eagle, taken = loaded(name, "torch"), list[object]()
    eagle.use_graphs(lambda key, step: (taken.append(key), step()))
    rows, rates = rows_of(eagle, [40, 18]), np.full((POSITIONS, BUCKETS), 0.5, np.float32)
    assert rows.draft(9, rates, 0.1).counts.tolist() == [3, 3]
    assert len(taken) == 3 and len(set(taken)) == 1
    assert taken[0] in [key for key, _ in rows.drafts.steps()], "a step that was captured at the start"


@both
def test_only_the_last_missing_pairs_are_caught_up_with(kernels: str) -> None:
    """Hidden states before it are not read, be they NaN, and what was fed before is not attended to."""
    rows = rows_of(loaded("qwen3", kernels), [40, 600, 9], catch_up=8)
    rows.feed(1, 1, 560)
    rows.pages[rows.slots(0, np.arange(30))] = float("nan")
    check(rows.draft([4, 3, 2]), rows, "qwen3")
    assert rows.rows.first[rows.rows.slot].tolist() == [32, 592, 1]


@both
def test_drafts_end_where_cumulative_acceptance_falls_too_low(kernels: str) -> None:
    eagle = loaded("qwen2", kernels)
    rates = np.sort(np.random.default_rng(0).uniform(0.3, 1.0, (POSITIONS, BUCKETS)).astype(np.float32), axis=1)
    lengths, totals = list(range(5, 17)), []
    free = rows_of(eagle, lengths).draft(12, rates)
    for limit in (0.05, 0.3, 0.6, 0.95):
        cut = rows_of(eagle, lengths).draft(12, rates, limit)
        for row in range(12):
            a, b = of_row(free, row), of_row(cut, row)
            n = int((a.cumulative_acceptance >= limit).sum())
            assert b.counts[0] == n
            np.testing.assert_array_equal(a.tokens[:n], b.tokens)
            np.testing.assert_allclose(a.cumulative_acceptance[:n], b.cumulative_acceptance, rtol=1e-5)
        totals.append(int(cut.counts.sum()))
    assert totals == sorted(totals, reverse=True) and totals[0] > totals[1] > totals[2]


@both
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_draft_some_tokens(kernels: str, value: float) -> None:
    """A bad drafter can only be slow: it costs no rollout."""
    eagle = loaded("qwen2", kernels)
    eagle.load_weights((name, torch.full_like(w, value)) for name, w in eagle_weights(CONFIGS["qwen2"]))
    drafted = rows_of(eagle, [40, 18]).draft(4)
    assert drafted.counts.tolist() == [4, 4]
    assert all(0 <= token < CONFIGS["qwen2"].vocab_size for token in drafted.tokens.tolist())
    assert set(drafted.feature % BUCKETS) == {BUCKETS - 1}


@both
@pytest.mark.parametrize("name", ["qwen2", "odd"])
def test_bf16_is_close(name: str, kernels: str) -> None:
    eagle = loaded(name, kernels, torch.bfloat16)
    rows = rows_of(eagle, [50], temperature=0.0)
    weights = ([(n, w.bfloat16().float()) for n, w in f(CONFIGS[name])] for f in (random_weights, eagle_weights))
    check_row(rows.draft(1), rows, 0, *weights, atol=6e-2)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in CONFIGS), ("odd", torch.bfloat16), ("eagle3", torch.bfloat16)],
)
def test_a_native_draft_ignores_its_neighbours_and_the_threads(name: str, dtype: torch.dtype) -> None:
    """300 rows are more than are computed together; some end early, and some catch up over a border of 256 pairs."""
    lengths = [2 + (i * 7) % 40 for i in range(300)] if name == "qwen3" else [3, 270, 17, 256, 388, 2]
    one, two = loaded(name, "native", dtype), loaded(name, "native", dtype, threads=2)
    wanted = [1 + i % 5 for i in range(len(lengths))]
    together = [rows_of(eagle, lengths, seed=i).draft(wanted) for i, eagle in enumerate((one, two))]
    assert_same(*together)
    for row in range(0, len(lengths), 1 + len(lengths) // 20):
        alone = rows_of(one, lengths[row : row + 1], seed=5)
        alone.rows.keys[:] = rows_of(one, lengths).rows.keys[row]
        for start in range(1, lengths[row] - 1, 7):  # fed in other pieces
            alone.feed(0, start, min(start + 7, lengths[row] - 1))
        assert_same(of_row(together[0], row), alone.draft(wanted[row]))


@pytest.mark.parametrize(
    ("catch_up", "dtype"), [(1, torch.float32), (16, torch.float32), (17, torch.float32), (16, torch.bfloat16)]
)
def test_native_drafts_read_nothing_that_was_not_cached(catch_up: int, dtype: torch.dtype) -> None:
    results = []
    for fill in (0.0, float("nan")):
        rows = rows_of(loaded("qwen2", "native", dtype), [522], catch_up=catch_up)
        rows.kv.data.view(dtype).fill_(fill)
        results.append(rows.draft(5))
    assert_same(*results)
    assert np.isfinite(results[0].cumulative_acceptance).all()


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_ranks_draft_what_one_rank_drafts(size: int) -> None:
    """The drafter is whole on every rank; in PyTorch the policy's LM head is sharded, in C it is whole, too."""
    config = replace(CONFIGS["qwen2"], num_heads=8, num_kv_heads=4, head_dim=16)
    weights = random_weights(config), eagle_weights(config)

    def run(kernels: str, tp) -> Draft:
        policy = build_decoder(config, kernels=kernels, tp=tp)
        policy.load_weights(weights[0])
        eagle = KINDS["eagle"].build_decoder(policy, EagleConfig.of(config))
        eagle.load_weights(weights[1])
        return rows_of(eagle, [21, 33]).draft([5, 3])

    want, native = run("torch", None), run("native", None)
    for drafted in on_ranks(size, lambda rank: run("torch", rank)):
        np.testing.assert_array_equal(drafted.tokens, want.tokens)
    for rank in range(size):  # no collective: no rank waits for another
        assert_same(run("native", ThreadRank(rank, [None] * size, threading.Barrier(size, timeout=20))), native)


@pytest.mark.parametrize("name", CONFIGS)
def test_captured_steps_draft_the_same(name: str) -> None:
    """A graph runs a step again over the same buffers, which must not change it."""
    ran: list = []

    def run_step(key, step) -> None:
        ran.append(key)
        step()
        step()

    results = []
    for captured in (False, True):
        eagle = loaded(name, "torch")
        if captured:
            eagle.use_graphs(run_step)
        results.append(rows_of(eagle, [21, 40, 16]).draft([3, 7, 0]))
    assert_same(*results)
    assert ran == [("drafter", 2)] * 7


@both
def test_copied_blocks_serve_another_row(kernels: str) -> None:
    rows = rows_of(loaded("qwen3", kernels), [70, 70])
    rows.rows.keys[1] = rows.rows.keys[0]
    rows.feed(0, 1, 69)
    rows.rows.synced[rows.rows.slot[1]] = 68
    rows.drafter.copy_blocks(rows.kv, rows.tables[0].tolist(), rows.tables[1].tolist())
    drafted = rows.draft(4)
    assert_same(of_row(drafted, 0), of_row(drafted, 1))
    scratch = 1 if kernels == "torch" else 0
    assert rows.kv.nbytes == (rows.kv.num_blocks + scratch) * rows.drafter.kv_bytes_per_block(16)


@both
def test_weights_are_checked_and_replaced_and_a_push_to_the_policy_shows_at_once(kernels: str) -> None:
    config = CONFIGS["llama"]
    policy = build_decoder(config, kernels=kernels)
    eagle, weights = KINDS["eagle"].build_decoder(policy, EagleConfig.of(config)), eagle_weights(config, seed=4)
    rows = rows_of(eagle, [20])
    for wrong in (weights[1:], [*weights, ("lm_head.weight", torch.zeros(1))], [("fc.weight", torch.zeros(1))]):
        with pytest.raises(CheckpointError):
            eagle.load_weights(wrong)
    with pytest.raises(BackendError, match="before its weights"):
        rows.draft(2)
    for seed in (4, 9):
        pushed, drafter = random_weights(config, seed=seed), eagle_weights(config, seed=seed)
        policy.load_weights(pushed)
        eagle.load_weights(drafter)
        rows = rows_of(eagle, [20])
        check_row(rows.draft(3), rows, 0, pushed, drafter)


@both
def test_positions_beyond_the_first_rotary_table(kernels: str) -> None:
    config = replace(CONFIGS["qwen3"], max_position_embeddings=9000)
    policy = build_decoder(config, kernels=kernels)
    policy.load_weights(random_weights(config))
    eagle = KINDS["eagle"].build_decoder(policy, EagleConfig.of(config))
    eagle.load_weights(eagle_weights(config))
    for length in (4094, 4200):
        rows = rows_of(eagle, [length], catch_up=12)
        rows.feed(0, 4000, 4080)
        check_row(rows.draft(4), rows, 0, random_weights(config), eagle_weights(config), atol=2e-3)


def test_native_refuses_what_it_cannot_read() -> None:
    eagle = loaded("llama")
    assert rows_of(eagle, [699]).draft(2).counts[0] == 2  # 700 positions: pairs up to 699
    with pytest.raises(BackendError, match="position"):
        rows_of(eagle, [699]).draft(3)
    rows = rows_of(eagle, [9])
    rows.outputs[0, 0] = CONFIGS["llama"].vocab_size
    with pytest.raises(BackendError, match="token id"):
        rows.draft(2)
    wide = replace(rows.rows, outputs=rows.outputs.astype(np.int64))
    with pytest.raises(AssertionError, match="outputs"):
        eagle.row_drafter(rows.kv, wide, rows.pages)
    with pytest.raises(BackendError, match="block table"):
        rows.draft(50)
    rows.tables[0, 0] = rows.kv.num_blocks
    with pytest.raises(BackendError, match="block table"):
        rows.draft(2)
    with pytest.raises(BackendError, match="slot outside"):
        rows.feed(0, 1, 3)


def test_heads_that_c_has_no_room_for_are_refused() -> None:
    """A published drafter's may be wider than its policy's."""
    drafter = drafter_config(CONFIGS["eagle3"])
    policy = build_decoder(CONFIGS["eagle3"], kernels="native", aux_layers=drafter.aux_layers)
    with pytest.raises(ConfigError, match="head_dim = 258: must be at most 256"):
        KINDS["eagle3"].build_decoder(policy, replace(drafter, layer=replace(drafter.layer, head_dim=258)))
