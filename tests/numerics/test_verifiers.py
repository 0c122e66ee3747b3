"""The answers of speculation have exactly the policy's distribution: enumerated where possible, not sampled.

Legend: V vocabulary, g drafted tokens, B rows, T fed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from megatron_tlt.distributed.tensor_parallel import SingleRank
from megatron_tlt.models.keys import row_keys
from megatron_tlt.rollout.sampler import gumbel_noise
from megatron_tlt.rollout.spec import unkeyed as unkeyed_module
from megatron_tlt.rollout.spec.block import block_verify
from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.noise import draft_keys
from megatron_tlt.rollout.spec.unkeyed import policy_distribution, unkeyed
from megatron_tlt.rollout.spec.verify import follow
from tests.helpers.enumerate_spec import (
    Outcomes,
    TreeCase,
    all_drafts,
    all_trees,
    block_outcomes,
    cells,
    contexts_along,
    continued,
    coupled_step,
    decode,
    error,
    first_of,
    g_test,
    joint,
    longer_of_two,
    policy_joint,
    random_table,
    shared_noise,
    token_rule_accepted,
    tree_outcomes,
)
from tests.helpers.table_run import TableRun

EXACT = 1e-12
CRITICAL = 1e-6  # of a p-value; the seeds are fixed
V = 3
KINDS = [("dense", "dense"), ("zeros", "dense"), ("dense", "zeros"), ("zeros", "zeros")]
KINDS += [("onehot", "dense"), ("dense", "onehot"), ("onehot", "onehot")]


def tables(kinds: tuple[str, str], levels: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return random_table(rng, V, levels, kinds[0]), random_table(rng, V, levels, kinds[1])


def blocks(policy: np.ndarray, drafter: np.ndarray, length: int, **wrong) -> Outcomes:
    return block_outcomes(policy, drafter, *all_drafts(drafter, length), **wrong)


# Block verification, enumerated


@pytest.mark.parametrize("length", range(6))
@pytest.mark.parametrize("kinds", KINDS)
def test_block_verification_is_exact(kinds: tuple[str, str], length: int):
    for seed in range(4 if length < 5 else 2):
        policy, drafter = tables(kinds, length + 1, seed)
        outcomes = blocks(policy, drafter, length)
        assert error(outcomes, policy, length + 1) < EXACT
        if kinds == ("dense", "dense"):
            assert (
                error(outcomes, drafter, length + 1) > 0.01
            )  # not the drafter's: the checker sees differences


@pytest.mark.parametrize("length", range(1, 6))
def test_block_verification_accepts_all_of_the_policys_own_drafts(length: int):
    policy, _ = tables(("dense", "dense"), length + 1, length)
    outcomes = blocks(policy, policy, length)
    assert error(outcomes, policy, length + 1) < EXACT
    assert abs(outcomes.mean_accepted - length) < EXACT


@pytest.mark.parametrize("length", range(1, 5))
def test_certain_drafts_are_exact_one_by_one(length: int):
    """A suffix draft has no distribution: whatever it is, the answer has the policy's."""
    policy, _ = tables(("dense", "dense"), length + 1, length)
    drafts, _ = all_drafts(np.full_like(policy, 1 / V), length)
    for i in range(len(drafts)):
        outcomes = block_outcomes(policy, None, drafts[i : i + 1], np.ones(1))
        assert error(outcomes, policy, length + 1) < EXACT


def test_a_certain_draft_is_the_one_hot_case():
    policy, _ = tables(("dense", "dense"), 4, 9)
    drafts = np.array([[2, 0, 1]])
    one_hot = np.zeros_like(policy)
    one_hot[contexts_along(drafts, V)[0, :-1], drafts[0]] = 1.0
    certain = block_outcomes(policy, None, drafts, np.ones(1))
    drawn = block_outcomes(policy, one_hot, drafts, np.ones(1))
    np.testing.assert_allclose(certain.probability, drawn.probability, atol=EXACT)
    np.testing.assert_allclose(joint(certain, policy, 4), joint(drawn, policy, 4), atol=EXACT)


def test_blocks_accept_no_less_than_the_token_rule():
    gains: list[float] = []
    for length in range(1, 6):
        for seed in range(6):
            policy, drafter = tables(("dense", "dense"), length + 1, 50 + seed)
            ours, theirs = (
                blocks(policy, drafter, length).mean_accepted,
                token_rule_accepted(policy, drafter, length),
            )
            assert ours >= theirs - EXACT
            if length == 1:
                assert abs(ours - theirs) < EXACT
            else:
                gains.append(ours - theirs)
    assert min(gains) > 0
    assert max(gains) > 0.05


def test_the_token_rule_is_a_tree_of_one_candidate():
    policy, drafter = tables(("zeros", "dense"), 4, 3)
    outcomes = tree_outcomes(policy, drafter, all_trees(drafter, [(-1, 1), (0, 1), (1, 1)]))
    assert error(outcomes, policy, 4) < EXACT
    assert abs(outcomes.mean_accepted - token_rule_accepted(policy, drafter, 3)) < EXACT


def test_lengths_decided_before_the_token_is_drawn_are_exact():
    """Early stop: token i + 1 is drafted only if token i was not 0."""
    policy, drafter = tables(("dense", "dense"), 4, 12)

    def stop_after_zero(drafts: np.ndarray) -> np.ndarray:
        is_zero = drafts == 0
        return np.where(is_zero.any(1), is_zero.argmax(1) + 1, drafts.shape[1])

    assert error(blocks(policy, drafter, 3, lengths=stop_after_zero), policy, 4) < EXACT


# Recursive rejection, enumerated

SHAPES = {
    "two": [(-1, 2), (0, 2), (1, 2)],
    "three": [(-1, 3), (0, 3), (1, 3), (2, 3)],
    "trunk": [(-1, 2), (0, 2), (2, 2)],  # siblings beside a chain, as the eagle drafter makes them
    "uneven": [(-1, 3), (1, 1), (3, 2)],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kinds", KINDS)
def test_recursive_rejection_is_exact(kinds: tuple[str, str], shape: str):
    policy, drafter = tables(kinds, 5, 21)
    outcomes = tree_outcomes(policy, drafter, all_trees(drafter, SHAPES[shape]))
    assert error(outcomes, policy, 5) < EXACT


def test_recursive_rejection_accepts_the_policys_own_drafts():
    policy, _ = tables(("dense", "dense"), 3, 5)
    outcomes = tree_outcomes(policy, policy, all_trees(policy, SHAPES["two"]))
    assert error(outcomes, policy, 3) < EXACT
    assert abs(outcomes.mean_accepted - 2) < EXACT


def test_certain_candidates_are_exact_one_by_one():
    policy, _ = tables(("dense", "dense"), 4, 8)
    for case in all_trees(np.full_like(policy, 1 / V), SHAPES["two"])[::5]:
        certain = TreeCase(1.0, case.tokens, case.parents, case.contexts)
        assert error(tree_outcomes(policy, None, [certain]), policy, 3) < EXACT


def test_candidates_drawn_in_another_order_are_seen():
    """The order is part of the draw: verifying the last candidate first is biased, and the enumeration says so."""
    policy, drafter = tables(("dense", "dense"), 2, 4)
    cases = all_trees(drafter, [(-1, 2)])
    turned = [TreeCase(c.probability, c.tokens[::-1], c.parents, [0, *c.contexts[:0:-1]]) for c in cases]
    assert error(tree_outcomes(policy, drafter, cases), policy, 2) < EXACT
    assert error(tree_outcomes(policy, drafter, turned), policy, 2) > 0.01


# Coupled verification: equality, then the same enumeration


@pytest.mark.parametrize("kinds", KINDS)
def test_coupled_verification_is_exact(kinds: tuple[str, str]):
    policy, drafter = tables(kinds, 3, 30)
    uniforms, weights = shared_noise([policy, drafter], 3)
    drafts = decode(drafter, uniforms[:, :2])
    emitted, counts = coupled_step(policy, drafts, np.full(len(drafts), 2), uniforms)
    answer = continued(emitted, policy, uniforms)
    assert np.array_equal(answer, decode(policy, uniforms))
    found = np.bincount(cells(answer, V), weights, minlength=V**3)
    assert np.abs(found - policy_joint(policy, 3)).max() < EXACT
    assert kinds != ("dense", "dense") or set(counts.tolist()) == {1, 2, 3}


def test_inversion_noise_is_enumerated_completely():
    policy, drafter = tables(("dense", "zeros"), 3, 31)
    uniforms, weights = shared_noise([policy, drafter], 3)
    for table in (policy, drafter):
        found = np.bincount(cells(decode(table, uniforms), V), weights, minlength=V**3)
        assert np.abs(found - policy_joint(table, 3)).max() < EXACT


# Constructions that are known to be biased (facts of speculation, section 2), with their published figures

P2, Q2 = np.tile([0.7, 0.3], (3, 1)), np.tile([0.5, 0.5], (3, 1))


def retrospective(drafts: np.ndarray) -> np.ndarray:
    """Token 1 looks bad, so a draft is cut before it: the length knows the token."""
    is_one = drafts == 1
    return np.where(is_one.any(1), is_one.argmax(1), drafts.shape[1])


WRONG: dict[str, tuple[Callable[[np.ndarray, np.ndarray, int], Outcomes], list[float]]] = {
    "retrospective length": (partial(blocks, lengths=retrospective), [0.85, 0.15]),
    "resume from p": (partial(blocks, resume_from_policy=True), [0.64, 0.36]),
    "longer of two": (lambda p, q, g: longer_of_two(blocks(p, q, g)), [0.64, 0.36]),
}


@pytest.mark.parametrize("name", WRONG)
def test_biased_constructions_are_seen(name: str):
    build, figures = WRONG[name]
    first_token = joint(build(P2, Q2, 1), P2, 2).reshape(2, 2).sum(1)
    np.testing.assert_allclose(first_token, figures, atol=EXACT)
    assert error(blocks(P2, Q2, 1), P2, 2) < EXACT
    policy, drafter = tables(("dense", "dense"), 4, 2)
    assert error(build(policy, drafter, 3), policy, 4) > 0.01
    assert error(blocks(policy, drafter, 3), policy, 4) < EXACT


@pytest.mark.parametrize("name", WRONG)
def test_biased_constructions_are_harmless_when_coupled(name: str):
    """What is emitted does not depend on the draft, so neither a choice by the draft nor one by the verdict matters."""
    policy, drafter = tables(("dense", "dense"), 3, 2)
    other = random_table(np.random.default_rng(77), V, 3)
    uniforms, weights = shared_noise([policy, drafter, other], 3)
    drafts = decode(drafter, uniforms[:, :2])
    full = np.full(len(drafts), 2)
    lengths = retrospective(drafts) if name == "retrospective length" else full
    emitted, counts = coupled_step(policy, drafts, lengths, uniforms)
    if name == "longer of two":
        second, second_counts = coupled_step(policy, decode(other, uniforms[:, :2]), full, uniforms)
        assert (second_counts > counts).any() and (second_counts < counts).any()
        emitted = np.where((second_counts > counts)[:, None], second, emitted)
    answer = continued(emitted, policy, uniforms)  # "resume from p" is what coupled verification does anyway
    assert np.array_equal(answer, decode(policy, uniforms))
    found = np.bincount(cells(answer, V), weights, minlength=V**3)
    assert np.abs(found - policy_joint(policy, 3)).max() < EXACT


# The real thing: logits, keys, ragged batches


def coupled(logits, rows, draft, sampler):
    tokens = sampler.sample(logits, rows)[0].numpy()
    verdict = follow(tokens, draft)
    return verdict.counts, tokens[verdict.index]


def blockwise(logits, rows, draft, sampler):
    verdict, tokens, _ = unkeyed(logits, rows, draft, sampler, SingleRank())
    return verdict.counts, tokens


def same_keys(keys, begin):
    return keys


def two(rng, count):
    return np.full(count, 2)


def some_logits(vocab: int, levels: int, seed: int, spread: float = 1.5) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(first_of(levels, vocab), vocab)) * spread


def log_table(levels: int, seed: int, vocab: int = V) -> np.ndarray:
    return np.log(random_table(np.random.default_rng(seed), vocab, levels))


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("drafter", ["good", "unrelated", "adversarial"])
def test_coupled_answers_are_those_of_plain_decoding(drafter: str, temperature: float, topk: int):
    """4,096 requests of 6 tokens with draft lengths that change at random; equality, not likeness."""
    policy = some_logits(4, 6, 0)
    logits = {
        "good": policy + some_logits(4, 6, 1, 0.3),
        "unrelated": some_logits(4, 6, 2),
        "adversarial": -policy,
    }
    run = TableRun(policy, logits[drafter], 6, seed=3, count=4096)
    run.temperature = temperature
    expected = run.plain()
    stream = {"good": same_keys, "unrelated": same_keys, "adversarial": draft_keys}[drafter]
    answers = run.speculative(coupled, stream, lambda rng, n: rng.integers(0, 6, n), topk)
    assert np.array_equal(answers, expected)
    if drafter == "good":
        assert run.accepted > 0.8 * run.steps
    else:
        assert (run.accepted == 0) == (drafter == "adversarial" and temperature == 0)


def test_coupled_acceptance_is_as_promised():
    """P(match) = sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x) exactly, between (1-TV)/(1+TV) and 1-TV."""
    count = 400_000
    for seed in range(3):
        rng = np.random.default_rng(seed)
        p, q = rng.dirichlet(np.ones(8)), rng.dirichlet(np.ones(8) * 2)
        p = 0.7 * p + 0.3 * q
        run = TableRun(np.log(p)[None], np.log(q)[None], 1, seed, count)
        keys = torch.from_numpy(row_keys(run.keys, np.zeros(count, np.int64)).view(np.int64))
        noise = gumbel_noise(keys, 8)
        drawn, drafted = ((torch.from_numpy(np.log(t)).float() + noise).argmax(-1).numpy() for t in (p, q))
        ones = np.ones(count, np.int32)
        sampled = np.zeros(2 * count, np.int32)
        sampled[::2] = drawn
        draft = Draft(ones, drafted.astype(np.int32), ones.astype(np.float32), ones)
        rate = float(follow(sampled, draft).accepted.mean())
        tv = 0.5 * np.abs(p - q).sum()
        exact = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(8))
        noise_of_rate = 5 * np.sqrt(exact * (1 - exact) / count)
        assert abs(rate - exact) < noise_of_rate
        assert (1 - tv) / (1 + tv) <= exact <= 1 - tv
        assert (1 - tv) / (1 + tv) - noise_of_rate < rate < 1 - tv + noise_of_rate


# A million draws

MILLION = 1 << 20


def p_values(answers: np.ndarray, policy: np.ndarray) -> list[float]:
    """Of the whole answer, and of its first, second, ... token."""
    length, vocab = answers.shape[1], policy.shape[1]
    expected = policy_joint(policy, length)
    shaped = expected.reshape([vocab] * length)
    found = [g_test(cells(answers, vocab), expected)]
    for i in range(length):
        found.append(g_test(answers[:, i], shaped.sum(tuple(j for j in range(length) if j != i))))
    return found


def table_run(count: int) -> TableRun:
    return TableRun(log_table(3, 111), log_table(3, 112), 3, seed=5, count=count)


def distribution(logits: torch.Tensor) -> np.ndarray:
    return logits.double().softmax(-1).numpy()


def test_a_million_answers_of_block_verification():
    """Three tokens over several steps, so that a step drafts positions again that an earlier one had drafted."""
    run = table_run(MILLION)
    answers = run.speculative(blockwise, draft_keys, two)
    assert min(p_values(answers, distribution(run.policy))) > CRITICAL
    assert run.accepted > 0.3 * run.steps
    assert not np.array_equal(answers, run.plain())  # another draw of the same distribution


def test_answers_of_recursive_rejection():
    run = TableRun(log_table(2, 102), log_table(2, 103), 2, seed=6, count=1 << 15)
    answers = run.speculative(blockwise, draft_keys, two, topk=2)
    assert min(p_values(answers, distribution(run.policy))) > CRITICAL


def same_in_every_step(keys, begin):
    return keys ^ np.uint64(1234567)


@pytest.mark.parametrize("stream", [same_keys, same_in_every_step])
def test_drafts_from_the_wrong_noise_are_seen(stream):
    """Why drafters need `draft_keys`: the sampling noise, or one noise for each position, shows in the answers."""
    run = table_run(MILLION // 8)
    answers = run.speculative(blockwise, stream, two)
    assert min(p_values(answers, distribution(run.policy))) < CRITICAL


def test_a_wrong_verifier_is_seen(monkeypatch: pytest.MonkeyPatch):
    """The residual without p_i (as if the token rule's): what an engine shipped once."""
    right = unkeyed_module.residuals

    def unweighted(chain, rule, rows, lengths):
        rule.weight[:] = 1.0
        return right(chain, rule, rows, lengths)

    monkeypatch.setattr(unkeyed_module, "residuals", unweighted)
    run = table_run(MILLION // 8)
    answers = run.speculative(blockwise, draft_keys, two)
    assert min(p_values(answers, distribution(run.policy))) < CRITICAL


@pytest.mark.parametrize("masks", [{"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}, {}])
def test_masked_block_verification(masks: dict[str, float]):
    """The policy's temperature and masks, while the drafter knows of no mask; its masked tokens are never emitted."""
    run = TableRun(some_logits(6, 2, 14, 1.0), some_logits(6, 2, 15, 1.0), 2, seed=7, count=MILLION // 8)
    run.temperature = 0.8
    for name, value in masks.items():
        setattr(run, name, value)
    # What plain sampling draws from; `test_verify.py` holds this against transformers.
    expected = policy_distribution(run.policy, run.sampling(np.zeros(len(run.policy), np.uint64))).numpy()
    assert bool(masks) == bool((expected == 0).any())
    assert min(p_values(run.speculative(blockwise, draft_keys, two), expected)) > CRITICAL


@pytest.mark.parametrize("masks", [{"top_p": 0.9}, {"min_p": 0.1}])
def test_masks_are_not_applied_to_the_residual_again(masks: dict[str, float]):
    """The last token is rare in the residual (1 in 31) and not in the policy, whose masks keep everything."""
    policy, drafter = np.tile([0.5, 0.3, 0.2], (4, 1)), np.tile([0.2, 0.61, 0.19], (4, 1))
    run = TableRun(np.log(policy), np.log(drafter), 2, seed=9, count=MILLION // 8)
    for name, value in masks.items():
        setattr(run, name, value)
    assert min(p_values(run.speculative(blockwise, draft_keys, two), policy)) > CRITICAL


@pytest.mark.parametrize("topk", [1, 3])
def test_greedy_answers_are_the_arg_max(topk: int):
    """At temperature 0 both verifiers give plain decoding's answer, whatever the drafter thinks."""
    run = TableRun(some_logits(4, 5, 3), some_logits(4, 5, 4), 5, seed=1, count=50)
    run.temperature = 0.0
    assert np.array_equal(run.speculative(blockwise, draft_keys, two, topk), run.plain())


def test_a_step_without_drafts_is_plain_decoding():
    small = table_run(500)
    nothing = small.speculative(blockwise, draft_keys, lambda rng, n: np.zeros(n, np.int64))
    assert np.array_equal(nothing, small.plain())


def test_blocks_by_inversion():
    """`block_verify` alone, on the two first tokens, uniforms from a generator."""
    policy, drafter = tables(("dense", "dense"), 2, 40)
    rng, count = np.random.default_rng(1), 2_000
    found = np.zeros((count, 2), np.int64)
    for i in range(count):
        first = int(np.searchsorted(np.cumsum(drafter[0]), rng.random(), side="right"))
        p = np.stack([policy[0], policy[1 + first]])
        length, last = block_verify(p, drafter[:1], np.array([first]), rng.random(1), rng.random())
        head = first if length else last
        tail = last if length else np.searchsorted(np.cumsum(policy[1 + head]), rng.random(), side="right")
        found[i] = head, tail
    assert min(p_values(found, policy)) > CRITICAL
