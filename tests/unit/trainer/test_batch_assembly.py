"""The assembler on one rank, and the placement rule for many."""

import pickle
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_tlt.algorithms.build import ALGORITHMS, build_algorithm
from megatron_tlt.config.actor import ActorSection
from megatron_tlt.config.algorithm import AlgorithmSection
from megatron_tlt.config.dims import Dims
from megatron_tlt.distributed.exchange import sum_over_replicas
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.observe.rollouts import rank_row
from megatron_tlt.rollout.speculation.history import ResponseHistory
from megatron_tlt.trainer import batch_assembly
from megatron_tlt.trainer.batch_assembly import BatchAssembler, group_samples, place, share_responses
from megatron_tlt.types import EngineStats, Prompt, RewardResult, Sample, Trajectory


def policy_of(logprobs=None, **actor):
    return SimpleNamespace(dims=Dims(), actor=ActorSection(**actor), logprobs=logprobs, policy_version=3)


def assembled(algorithm, groups, logprobs=None, temperature=1.0, scored=None):
    """The step's table and batch on one rank; `scored`: more groups than those to train on."""
    full = len(groups)
    assembler = BatchAssembler(SingleProcess(), policy_of(logprobs), algorithm, temperature, full)
    table, parts = assembler.exchange(groups, scored or groups)
    return table, assembler.build_batch(parts, table)


def make_groups(num_prompts=4, samples=3):
    rng = np.random.default_rng(0)
    prompts = [Prompt(10 + p, f"q{p}", tuple(range(p + 2)), "?") for p in range(num_prompts)]
    responses = [
        Sample(p.prompt_id, i, list(range(int(n))), [-0.5] * int(n), "", "length" if n > 7 else "stop", 3)
        for p in prompts
        for i, n in enumerate(rng.integers(1, 9, samples))
    ]
    groups = group_samples(prompts, responses[::-1])
    for group in groups:
        group.rewards = [RewardResult(float(s.sample_index == 1), s.sample_index == 1) for s in group.samples]
    return groups


def test_placement_keeps_prompts_whole_and_balances_tokens():
    rng = np.random.default_rng(1)
    prompt_id = np.repeat(np.arange(32), 8)
    costs = rng.geometric(0.01, len(prompt_id)) + 20
    has_gradient = prompt_id % 3 > 0
    mini_batch, dp_rank = place(prompt_id, costs, has_gradient, mini_batches=4, full=32, dp=4)
    for prompt in range(32):
        assert set(mini_batch[prompt_id == prompt]) == {prompt // 8}
    for index in range(4):
        loads = [costs[(mini_batch == index) & (dp_rank == dp)].sum() for dp in range(4)]
        assert max(loads) <= 1.1 * np.mean(loads)
    assert np.array_equal(dp_rank < 0, ~has_gradient)
    again = place(prompt_id, costs, has_gradient, mini_batches=4, full=32, dp=4)
    assert all(np.array_equal(a, b) for a, b in zip((mini_batch, dp_rank), again, strict=True))


@pytest.mark.parametrize(
    ("prompts", "sizes"), [(3, [3, 0, 0, 0]), (8, [8, 0, 0, 0]), (19, [8, 8, 3, 0]), (32, [8] * 4), (34, [9, 8, 9, 8])]
)
def test_a_step_of_fewer_prompts_has_fewer_updates_of_the_same_size(prompts, sizes):
    """And one of more, as some with carried responses have, as many: all are larger."""
    prompt_id = np.repeat(np.arange(prompts) * 5, 2)
    mini_batch, _ = place(prompt_id, prompt_id + 9, prompt_id >= 0, mini_batches=4, full=32, dp=2)
    assert np.bincount(mini_batch, minlength=4).tolist() == [2 * size for size in sizes]


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_batch_holds_every_sample_once_with_its_advantage(mini_batches):
    algorithm = build_algorithm(AlgorithmSection(name="grpo", mini_batches=mini_batches), max_tokens=8)
    groups = make_groups()
    _, batch = assembled(algorithm, groups, temperature=0.7)
    assert len(batch.mini_batches) == mini_batches and batch.temperature == 0.7
    seen = {(s.trajectory.prompt_id, s.trajectory.sample_index): s for part in batch.mini_batches for s in part}
    assert len(seen) == 12 == sum(map(len, batch.mini_batches))
    for group in groups:
        for sample, reward in zip(group.samples, group.rewards, strict=True):
            sequence = seen[sample.prompt_id, sample.sample_index]
            assert sequence.trajectory.token_ids.tolist() == [*group.prompt.token_ids, *sample.token_ids]
            assert sequence.trajectory.response_start == len(group.prompt.token_ids)
            expected = (reward.value - 1 / 3) / (np.std([0, 1, 0], ddof=1) + 1e-6)
            np.testing.assert_allclose(sequence.advantages, expected, rtol=1e-4)
    assert all(d > 0 for d in batch.denominators)


def test_kl_in_the_reward_lowers_the_sample_that_drifted():
    section = AlgorithmSection(name="dr_grpo", kl_coef=0.5, kl_in="reward")
    algorithm = build_algorithm(section, max_tokens=8)

    def logprobs(sequences, temperature, which):
        assert temperature == 0.7
        drifted = {0: 2.0 if which == "policy" else 0.0}
        return [np.full(len(s.advantages), drifted.get(s.trajectory.sample_index, 0.0), np.float32) for s in sequences]

    _, batch = assembled(algorithm, make_groups(num_prompts=1), logprobs, temperature=0.7)
    first, _, third = batch.mini_batches[0]
    assert first.advantages[0] < third.advantages[0]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_responses_without_a_gradient_are_counted_and_not_trained_on(name):
    """Two of four groups have equal rewards, 0.1 and 0: their responses count in divisors and figures only."""
    section = AlgorithmSection(name=name, mini_batches=2, advantage_eps=1e-9)
    algorithm, groups = build_algorithm(section, max_tokens=8), make_groups()
    for group, reward in ((groups[0], 0.1), (groups[3], 0.0)):
        group.rewards = [RewardResult(reward, False) for _ in group.samples]

    table, batch = assembled(algorithm, groups)
    trained = [[s.trajectory.prompt_id for s in part] for part in batch.mini_batches]
    lengths = np.array([[len(s.token_ids) for s in group.samples] for group in groups])
    is_whole_batch = name in ("reinforce_pp", "distill")  # the batch as baseline; the teacher
    expected = [[10] * 3 + [11] * 3, [12] * 3 + [13] * 3] if is_whole_batch else [[11] * 3, [12] * 3]
    assert trained == expected
    assert batch.denominators == [algorithm.divisor(lengths[:2].ravel()), algorithm.divisor(lengths[2:].ravel())]
    skipped = 0 if is_whole_batch else lengths[[0, 3]].sum()
    assert table.metrics()["update/skipped_tokens"] == skipped
    assert table.metrics()["update/skipped_share"] == pytest.approx(skipped / lengths.sum())
    assert table.metrics()["rollout/samples"] == 12


def test_figures_are_of_all_that_was_scored_before_overlong_shaping():
    """One group of two is trained on; responses of more than 6 tokens have a penalty of 0.5 and more."""
    section = AlgorithmSection(dynamic_sampling=True, overlong_buffer=4)
    groups = make_groups(num_prompts=2)
    lengths = [len(s.token_ids) for group in groups for s in group.samples]
    penalties = [min(max(n - 4, 0) / 4, 1.0) for n in lengths]
    groups[1].samples[0].finish_reason = "abort"  # in lengths only
    groups[1].rewards = [RewardResult(1.0, True) for _ in range(3)]
    table, batch = assembled(build_algorithm(section, max_tokens=8), groups[:1], scored=groups)
    metrics, values = table.metrics(), [0.0, 1.0, 0.0, 1.0, 1.0]
    assert (metrics["rollout/samples"], len(batch.mini_batches[0])) == (6, 3)
    assert (metrics["length/mean"], metrics["length/max"]) == (np.mean(lengths), max(lengths))
    assert metrics["reward/mean"] == metrics["reward/accuracy"] == np.mean(values)
    assert metrics["reward/std"] == pytest.approx(np.std(values))
    assert metrics["reward/overlong_penalty"] == pytest.approx(np.mean(penalties[:3] + penalties[4:])) != 0
    assert np.array_equal(table.rewards.reward, np.array(values[:3]) - penalties[:3])
    alone, _ = assembled(build_algorithm(AlgorithmSection(), max_tokens=8), groups[:1])
    assert "reward/overlong_penalty" not in alone.metrics() and alone.metrics()["reward/mean"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("reason", "is_cut"), [("length", True), ("max_turns", True), ("cut", True), ("env", False), ("stop", False)]
)
def test_whatever_limit_has_cut_a_response_it_counts_as_truncated_and_may_be_masked(reason, is_cut):
    groups = make_groups(num_prompts=1)
    for sample, finish in zip(groups[0].samples, ("stop", reason, "stop"), strict=True):
        sample.finish_reason = finish
    figures, batch = built(groups, "grpo", mask_truncated=True)
    assert figures["length/truncated"] == pytest.approx(is_cut / 3)
    assert [s.trajectory.sample_index for s in batch.mini_batches[0]] == ([0, 2] if is_cut else [0, 1, 2])


EVERY = [(name, kl) for name in sorted(ALGORITHMS) for kl in ({}, {"kl_coef": 0.5, "kl_in": "reward"})]


def built(groups, name, **section):
    """Figures and batch of groups. Log-probs are functions of the token, the policy's and the reference's differ."""

    def logprobs(sequences, temperature, which):
        tokens = [s.trajectory.token_ids[s.trajectory.response_start :] for s in sequences]
        return [ids * (-0.1 if which == "policy" else -0.3) for ids in tokens]

    algorithm = build_algorithm(AlgorithmSection(name=name, **section), max_tokens=8)
    table, batch = assembled(algorithm, groups, logprobs)
    return table.metrics(), batch


def assert_same_where_drawn(plain, batch):
    """Every sequence of `batch` is that of `plain` but for given tokens, which have neither loss nor log-probs."""
    assert batch.denominators == plain.denominators
    for single, sequence in zip(chain(*plain.mini_batches), chain(*batch.mini_batches), strict=True):
        drawn = sequence.trajectory.drawn
        assert not sequence.loss_mask[~drawn].any() and not sequence.trajectory.logprobs[~drawn].any()
        assert sequence.weight == single.weight and np.array_equal(sequence.advantages[drawn], single.advantages)
        assert np.array_equal(sequence.loss_mask[drawn], single.loss_mask)
        assert np.array_equal(sequence.trajectory.logprobs[drawn], single.trajectory.logprobs)
        assert sequence.trajectory.sample_index == single.trajectory.sample_index


@pytest.mark.parametrize(("name", "kl"), EVERY)
def test_given_tokens_are_positions_and_nothing_else(name, kl):
    """Responses with two given tokens behind the first drawn one: whatever is not theirs is as without them."""
    longer = make_groups()
    for sample in (sample for group in longer for sample in group.samples):
        sample.token_ids[1:1], sample.logprobs[1:1] = [900, 901], [0.0, 0.0]
        sample.given = ((1, 3),)
    (metrics, plain), (also, batch) = (built(of, name, mini_batches=2, **kl) for of in (make_groups(), longer))
    assert also == metrics and batch.metrics == plain.metrics
    assert all(s.trajectory.drawn.all() and s.loss_mask.all() for s in chain(*plain.mini_batches))
    assert_same_where_drawn(plain, batch)


@pytest.mark.parametrize(("name", "kl"), EVERY)
def test_tokens_of_earlier_policies_have_no_loss_and_count_for_everything_else(name, kl):
    """The first response of each group waited, the others' first tokens are older."""
    groups = make_groups()
    for sample in (sample for group in groups for sample in group.samples):
        if sample.sample_index == 0:
            sample.policy_version = 2
        elif len(sample.token_ids) > 1:
            sample.earlier = ((2, 1),)
    (metrics, plain), (also, batch) = (
        built(groups, name, mini_batches=2, mask_off_policy=masked, **kl) for masked in (False, True)
    )
    skipped = {"update/skipped_tokens": 0, "update/skipped_share": 0}
    assert also | skipped == metrics | skipped
    assert batch.denominators == plain.denominators and batch.metrics == plain.metrics
    left = {(s.trajectory.prompt_id, s.trajectory.sample_index): s for s in chain(*batch.mini_batches)}
    assert not kl or len(left) == 12, "the KL of all tokens is part of the rewards"
    for sequence in chain(*plain.mini_batches):
        at = sequence.trajectory.prompt_id, sequence.trajectory.sample_index
        masked = left.pop(at, None)
        assert sequence.loss_mask.all()
        if at[1] == 0:
            assert masked is None or (kl and not masked.loss_mask.any())
        else:
            assert masked.loss_mask.tolist() == [0, *[1] * (len(masked.loss_mask) - 1)] or len(masked.loss_mask) == 1
            assert masked.weight == sequence.weight and np.array_equal(masked.advantages, sequence.advantages)
    assert not left


@pytest.mark.parametrize(("name", "kl"), EVERY)
def test_an_aborted_response_counts_for_nothing(name, kl):
    """Groups with one aborted response each, of a great reward, and all of one: the others are as without them."""
    more, without = make_groups(4), make_groups(4)
    for group in more:
        group.samples.append(Sample(group.prompt.prompt_id, 3, [1, 2], [-0.5] * 2, "", "abort", 3, failure="timeout"))
        group.rewards.append(RewardResult(100.0, True))
    for sample in more[0].samples:
        sample.finish_reason = "abort"
    without[0].samples, without[0].rewards = [], []
    (metrics, plain), (also, batch) = (built(of, name, **kl) for of in (without, more))
    rewards = [{n: v for n, v in of.items() if n.startswith("reward/")} for of in (metrics, also)]
    assert rewards[0] == rewards[1] != {}
    for n in plain.metrics.keys() - {"loss/masked_samples"}:
        assert batch.metrics[n] == pytest.approx(plain.metrics[n])
    assert sum(map(len, batch.mini_batches)) == 9
    assert_same_where_drawn(plain, batch)


@pytest.mark.parametrize("losses", [{}, {"load_balancing_loss": 0.01}, {"router_z_loss": 0.01}])
def test_losses_of_routers_have_a_gradient_in_every_response(losses):
    groups = make_groups()
    for group in groups[1:]:
        group.rewards = [RewardResult(0.0, False) for _ in group.samples]
    groups[1].samples[0].finish_reason = "abort"
    assembler = BatchAssembler(
        SingleProcess(), policy_of(**losses), build_algorithm(AlgorithmSection(), max_tokens=8), 1.0, len(groups)
    )
    _, (sequences,) = assembler.exchange(groups, groups)
    assert len(sequences) == (11 if losses else 3), "an aborted response is not trained on, whatever the loss"


def test_sums_of_a_step_are_those_of_one_rank_of_each_replica():
    """All ranks of a replica hold the same sequences."""
    world = SimpleNamespace(all_gather_object=lambda _: [np.array([rank]) for rank in range(4)])
    assert sum_over_replicas(world, Dims.fit(4, 2, 1, 1, 1), np.array([0])) == [0 + 2]


class Metered(SingleProcess):
    """Counts what a rank sends to every other one."""

    def __init__(self):
        self.sent, self.broadcasts = 0, 0

    def all_gather_object(self, value):
        self.sent += len(pickle.dumps(value))
        return [value]

    def broadcast_object(self, value, source):
        self.sent, self.broadcasts = self.sent + len(pickle.dumps(value)), self.broadcasts + 1
        return value


def scored(tokens, prompts=4, samples=6):
    """Groups whose responses have `tokens` tokens and one more each."""
    found = [Prompt(10 + p, f"q{p}", (1, 2), "?") for p in range(prompts)]
    rows = [(p.prompt_id, i) for p in found for i in range(samples)]
    responses = [Sample(at, i, list(range(tokens + i)), None, "", "stop", 3) for at, i in rows]
    groups = group_samples(found, responses)
    for group in groups:
        group.rewards = [RewardResult(float(s.sample_index % 3 == 1), True) for s in group.samples]
    return groups


def sent(history_responses, tokens):
    """Bytes to every rank, and what the history then keeps."""
    world = Metered()
    history = ResponseHistory(2, history_responses, mib=64)
    backend = SimpleNamespace(history_responses=history_responses, remember=history.remember)
    share_responses(world, backend, scored(tokens))
    assert world.broadcasts == (history_responses > 0), "one a rank, for tokens only"
    return world.sent, history


def test_what_every_rank_sends_to_every_other_grows_with_the_tokens_that_a_history_keeps_only():
    few, many = (sent(0, tokens)[0] for tokens in (50, 5000))
    assert many <= few + 2 * 24 and few / 24 < 120  # a length may take two bytes more
    assert sent(2, 5000)[0] < 4 * 6 * 4 * 5000 / 3 + 24 * 120 + 1000
    sizes = []
    for tokens in (50, 5000):  # the table of samples, and the row of a rank
        world, groups = Metered(), scored(tokens)
        algorithm = build_algorithm(AlgorithmSection(name="grpo"), max_tokens=8)
        BatchAssembler(world, policy_of(), algorithm, 1.0, len(groups)).exchange(groups, groups)
        world.all_gather_object(rank_row(EngineStats(), groups))
        sizes.append(world.sent)
    assert sizes[1] <= sizes[0] + 100 and sizes[0] < 24 * 100 + 1000


@pytest.mark.parametrize("most", [0, 2, 8])
def test_a_history_is_the_same_as_from_all_tokens(most):
    _, history = sent(most, 30)
    whole = ResponseHistory(2, most, mib=64)
    whole.remember([response for group in scored(30) for response in batch_assembly._past_responses(group)])
    assert history.state_dict() == whole.state_dict()
    for name in ("q0", "q3"):
        found, wanted = history.of(name), whole.of(name)
        assert [a.token_ids.tolist() for a in found] == [a.token_ids.tolist() for a in wanted]
        assert len(wanted) == min(most, 6)


def test_a_response_crosses_in_eight_bytes_a_token_and_its_experts_in_one_each():
    plain = Sample(1, 0, list(range(1000)), [-0.5] * 1000, "", "stop", 0)
    routed = replace(plain, routed_experts=np.zeros((1039, 48, 8), np.uint8))
    for sample, size in ((plain, 8), (routed, 8 + 48 * 8)):
        crossed = pickle.dumps(Trajectory.of(tuple(range(40)), sample), protocol=5)
        assert len(crossed) <= 1040 * size + 800
        trajectory = pickle.loads(crossed)
        assert trajectory.token_ids.tolist() == [*range(40), *range(1000)] and trajectory.response_start == 40
        assert trajectory.logprobs.tolist() == plain.logprobs and trajectory.drawn.all()
        assert np.array_equal(trajectory.routed_experts, sample.routed_experts)
