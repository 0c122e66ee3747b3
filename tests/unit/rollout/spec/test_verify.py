"""The verifiers' small cases: layouts, borders of the uniforms, streams, and how logits become verdicts.

Exactness of the distributions is in `tests/numerics/test_verifiers.py`.
Legend: B rows, N nodes, T = B + N, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megatron_tlt.distributed.tensor_parallel import SingleRank
from megatron_tlt.models.keys import MIX_A, MIX_B, request_key, row_keys
from megatron_tlt.rollout.sampler import Sampler, SamplingRows
from megatron_tlt.rollout.spec import unkeyed as unkeyed_module
from megatron_tlt.rollout.spec.block import block_verify, invert
from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.noise import ACCEPT_STREAM, accept_uniforms, draft_keys
from megatron_tlt.rollout.spec.recursive import recursive_reject, walk_tree
from megatron_tlt.rollout.spec.unkeyed import policy_distribution, unkeyed
from megatron_tlt.rollout.spec.verify import follow

CPU = torch.device("cpu")
ALMOST_ONE = float(np.nextafter(1.0, 0.0))


def draft_of(counts: list[int], tokens: np.ndarray, parents: np.ndarray | None = None, probs=None) -> Draft:
    nodes = len(tokens)
    return Draft(
        np.array(counts, np.int32),
        np.asarray(tokens, np.int32),
        np.ones(nodes, np.float32),
        np.ones(nodes, np.int32),
        None if parents is None else np.asarray(parents, np.int32),
        probs=probs,
    )


def random_draft(rng: np.random.Generator, rows: int, tree: bool, vocab: int = 3) -> Draft:
    counts = rng.integers(0, 7, rows).tolist()
    tokens, parents = [], []
    for count in counts:
        mine: list[tuple[int, int]] = []
        while len(mine) < count:
            parent = int(rng.integers(-1, len(mine))) if tree else len(mine) - 1
            token = int(rng.integers(0, vocab))
            if (parent, token) not in mine:  # siblings are distinct
                mine.append((parent, token))
            elif sum(p == parent for p, _ in mine) == vocab:
                mine.append((len(mine) - 1, token))
        parents += [p for p, _ in mine]
        tokens += [t for _, t in mine]
    return draft_of(counts, np.array(tokens, np.int32), np.array(parents, np.int32) if tree else None)


def walk(sampled: np.ndarray, draft: Draft) -> tuple[list[int], list[int], list[bool], list[bool]]:
    """`follow` as its definition reads."""
    counts, index, accepted, reached = [], [], [], []
    node = fed = 0
    for count in draft.counts.tolist():
        parents = (
            range(-1, count - 1) if draft.parents is None else draft.parents[node : node + count].tolist()
        )
        emitted = {-1: True}
        for i, parent in enumerate(parents):
            reached.append(emitted[parent])
            emitted[i] = emitted[parent] and sampled[fed + 1 + parent] == draft.tokens[node + i]
            accepted.append(emitted[i])
        path = sorted(i for i in emitted if emitted[i])
        counts.append(len(path))
        index += [fed + 1 + i for i in path]
        node, fed = node + count, fed + count + 1
    return counts, index, [bool(a) for a in accepted], [bool(r) for r in reached]


# Coupled


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 32])
def test_follow_is_its_definition(rows: int, tree: bool):
    rng = np.random.default_rng(rows)
    accepted_some = 0
    for _ in range(300):
        draft = random_draft(rng, rows, tree)
        sampled = rng.integers(0, 3, rows + draft.num_nodes).astype(np.int32)
        verdict = follow(sampled, draft)
        counts, index, accepted, reached = walk(sampled, draft)
        assert verdict.counts.tolist() == counts
        assert verdict.index.tolist() == index
        assert verdict.accepted.tolist() == accepted
        assert verdict.reached.tolist() == reached
        assert verdict.counts.dtype == verdict.index.dtype == np.int32
        assert verdict.accepted.dtype == verdict.reached.dtype == bool
        accepted_some += sum(accepted)
    assert accepted_some > 50


@pytest.mark.parametrize("rows", [1, 3])
def test_follow_without_drafts_emits_one_token_a_row(rows: int):
    verdict = follow(np.arange(rows, dtype=np.int32), Draft.empty(rows))
    assert verdict.counts.tolist() == [1] * rows
    assert verdict.index.tolist() == list(range(rows))
    assert len(verdict.accepted) == len(verdict.reached) == 0


@pytest.mark.parametrize("rows", [1, 2])
def test_of_equal_siblings_the_first_is_emitted(rows: int):
    """A drafter should not make them; the answer is right nonetheless."""
    draft = draft_of([3] * rows, np.tile([5, 5, 6], rows), np.tile([-1, -1, 1], rows))
    verdict = follow(np.tile([5, 6, 6, 0], rows).astype(np.int32), draft)
    assert verdict.accepted.tolist() == [True, False, False] * rows
    assert verdict.index.tolist() == [i + 4 * r for r in range(rows) for i in (0, 1)]


def test_an_end_token_inside_a_draft_is_a_token_like_others():
    """Truncation is the engine's: it sees what came after, too."""
    eos = 2
    verdict = follow(np.array([eos, 7, 8], np.int32), draft_of([2], np.array([eos, 7])))
    assert verdict.counts.tolist() == [3]


# Block verification and recursive rejection at the borders

HALF = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
SURE = np.array([[0.0, 0.0, 1.0]])


@pytest.mark.parametrize("drafter", [None, SURE, np.array([[0.2, 0.2, 0.6]])])
def test_a_token_of_probability_zero_is_never_accepted(drafter: np.ndarray | None):
    length, token = block_verify(HALF, drafter, np.array([2]), np.zeros(1), 0.0)
    assert (length, token) == (0, 0)
    accepted, rest = recursive_reject(
        HALF[0], None if drafter is None else drafter[0], np.array([2]), np.zeros(1)
    )
    assert accepted is None and rest[2] == 0


def test_nothing_behind_a_token_of_probability_zero_is_accepted():
    policy = np.stack([HALF[0], np.eye(3)[1], np.eye(3)[1], np.eye(3)[1]])
    drafter = np.stack([np.full(3, 1 / 3)] * 3)
    length, token = block_verify(policy, drafter, np.array([2, 1, 1]), np.zeros(3), ALMOST_ONE)
    assert length == 0 and token < 2


@pytest.mark.parametrize("uniform", [0.0, ALMOST_ONE])
def test_a_certain_acceptance_does_not_depend_on_the_uniform(uniform: float):
    policy = np.array([[0.2, 0.8], [0.6, 0.4]])
    assert block_verify(policy, policy[:1], np.array([0]), np.array([uniform]), 0.0) == (1, 0)
    assert recursive_reject(policy[0], policy[0], np.array([0]), np.array([uniform]))[0] == 0
    assert block_verify(policy, None, np.array([1]), np.array([ALMOST_ONE]), 0.0)[0] == 0
    assert block_verify(policy, None, np.array([1]), np.array([0.0]), 0.0)[0] == 1


def test_the_last_tokens_uniform_reaches_both_ends():
    policy = np.array([[0.0, 0.3, 0.7, 0.0]])
    nothing = np.empty(0, np.int64)
    assert block_verify(policy, None, nothing, np.empty(0), 0.0) == (0, 1)
    assert block_verify(policy, policy[:0], nothing, np.empty(0), ALMOST_ONE) == (0, 2)
    masses = np.random.default_rng(0).random((1000, 3)) * [1, 1, 0]
    assert {invert(mass, ALMOST_ONE) for mass in masses} == {1}


def test_a_draft_that_its_drafter_cannot_have_made_is_refused():
    with pytest.raises(AssertionError, match="probability 0"):
        block_verify(HALF, np.array([[1.0, 0.0, 0.0]]), np.array([1]), np.full(1, 0.5), 0.5)
    with pytest.raises(AssertionError, match="probability 0"):
        recursive_reject(HALF[0], np.array([1.0, 0.0, 0.0]), np.array([0, 0]), np.full(2, 0.9))


def test_equal_distributions_leave_no_residual_and_no_nan():
    """P = Q to the last bit along the draft: accepted whole, also where 0 / 0 stands in the formula."""
    policy = np.array([[0.3, 0.7], [0.1, 0.9], [0.25, 0.75], [1.0, 0.0]])
    with np.errstate(all="raise"):
        length, token = block_verify(policy, policy[:3], np.array([0, 1, 1]), np.full(3, ALMOST_ONE), 0.5)
    assert (length, token) == (3, 0)
    rule_rest = recursive_reject(policy[0], policy[0], np.array([0]), np.array([0.5]))[1]
    np.testing.assert_allclose(rule_rest, policy[0])


def test_a_tree_walk_goes_down_the_accepted_child():
    p = np.array([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8], [1.0, 0.0]])
    tokens, parents = np.array([0, 1, 1]), np.array([-1, -1, 1])
    # Certain candidates: 0 with 1/2, then 1 with 1 (nothing else is left), then 1 with 0.8.
    assert walk_tree(p, None, tokens, parents, np.array([0.9, 0.5, 0.7]))[0] == [1, 2]
    assert walk_tree(p, None, tokens, parents, np.array([0.9, 0.5, 0.7]))[1] is None
    path, rest = walk_tree(p, None, tokens, parents, np.array([0.9, 0.5, 0.8]))
    assert path == [1] and rest is not None
    np.testing.assert_allclose(rest, [1.0, 0.0])
    assert walk_tree(p, None, tokens, parents, np.array([0.4, 0.5, 0.5]))[0] == [0]


# Streams


def test_uniforms_do_not_depend_on_the_other_nodes():
    keys = row_keys(np.array([request_key(0, p, 0) for p in range(4)], np.uint64), np.arange(4))
    counts = np.array([3, 0, 5, 1])
    uniforms = accept_uniforms(keys, counts)
    assert len(uniforms) == 9 and uniforms.dtype == np.float64
    assert uniforms[3:8].tolist() == accept_uniforms(keys[2:3], np.array([5])).tolist()
    assert uniforms[3:5].tolist() == accept_uniforms(keys[2:3], np.array([2])).tolist()
    assert len(set(uniforms.tolist())) == 9


def test_uniforms_are_uniform_and_inside_the_interval():
    keys = row_keys(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, np.int64))
    uniforms = accept_uniforms(keys, np.full(20_000, 5))
    assert 0 < uniforms.min() < 1e-3 and 1 - 1e-3 < uniforms.max() < 1
    counts = np.histogram(uniforms, 64, (0, 1))[0]
    assert ((counts - 1562.5) ** 2 / 1562.5).sum() < 63 + 6 * np.sqrt(126)
    shaped = uniforms.reshape(-1, 5)
    correlation = np.corrcoef(shaped, rowvar=False)[np.triu_indices(5, 1)]
    assert np.abs(correlation).max() < 5 / np.sqrt(20_000)


def unmix(z: int) -> int:
    """The inverse of `keys.mix`."""
    for shift, factor in ((31, MIX_B), (27, MIX_A), (30, 1)):
        out = z
        for _ in range(3):
            out = z ^ (out >> shift)
        z = out * pow(factor, -1, 2**64) % 2**64
    return z


def test_uniforms_reach_neither_zero_nor_one():
    """Keys whose first uniform has no bit set, and all bits."""
    keys = np.array([unmix(unmix(bits)) for bits in (0, 2**64 - 1)], np.uint64) ^ ACCEPT_STREAM
    assert accept_uniforms(keys, np.array([1, 1])).tolist() == [2.0**-53, 1 - 2.0**-53]


def test_uniforms_are_not_those_of_the_draft_stream():
    requests = np.array([request_key(2, p, 0) for p in range(40)], np.uint64)
    begin = np.arange(40)
    uniforms = accept_uniforms(row_keys(requests, begin), np.full(40, 1))
    drawn = row_keys(draft_keys(requests, begin), np.zeros(40, np.int64))
    assert (np.abs(uniforms - drawn / 2.0**64) > 1e-9).all()


def test_draft_streams_are_new_in_every_step_and_apart_from_the_sampling_noise():
    requests = np.array([request_key(1, p, 0) for p in range(50)], np.uint64)
    plain = {int(k) for t in range(20) for k in row_keys(requests, np.full(50, t))}
    drawn = [
        row_keys(draft_keys(requests, np.full(50, s)), np.full(50, t))
        for s in range(10)
        for t in range(s, s + 9)
    ]
    flat = [int(k) for keys in drawn for k in keys]
    assert len(set(flat)) == len(flat) == 50 * 90
    assert not plain & set(flat)


# From logits


def sampling(count: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed: int = 0) -> SamplingRows:
    keys = row_keys(np.array([request_key(seed, i, 0) for i in range(count)], np.uint64), np.arange(count))
    return SamplingRows(
        keys,
        np.full(count, temperature, np.float32),
        np.full(count, top_k, np.int32),
        np.full(count, top_p, np.float64),
        np.full(count, min_p, np.float32),
        is_masked=top_k > 0 or top_p < 1 or min_p > 0,
    )


@pytest.mark.parametrize(
    "masks", [(0, 1.0, 0.0), (8, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (12, 0.9, 0.05)]
)
def test_the_policys_distribution_is_that_of_plain_sampling(masks: tuple[int, float, float]):
    top_k, top_p, min_p = masks
    logits = torch.randn(20, 60, generator=torch.Generator().manual_seed(1)) * 2
    rows = sampling(20, 0.8, *masks)
    rows.temperature[::4] = 0.0
    rows.top_k[1::4], rows.top_p[1::4], rows.min_p[1::4] = 0, 1.0, 0.0
    found = policy_distribution(logits, rows)
    ids = torch.zeros(20, 1, dtype=torch.long)
    scores = expected = TemperatureLogitsWarper(0.8)(ids, logits)
    expected = TopKLogitsWarper(top_k)(ids, expected) if top_k else expected
    expected = TopPLogitsWarper(top_p)(ids, expected) if top_p < 1 else expected
    expected = (MinPLogitsWarper(min_p)(ids, expected) if min_p else expected).double().softmax(-1)
    expected[1::4] = scores[1::4].double().softmax(-1)
    expected[::4] = torch.nn.functional.one_hot(logits[::4].argmax(-1), 60).double()
    assert torch.equal(found, expected)


@dataclass
class Pair:
    """Two tensor-parallel ranks, one after the other: rank 1 gets what rank 0 broadcast."""

    rank: int = 0
    size: int = 2
    sent: list[Tensor] = field(default_factory=list)

    def broadcast(self, tensor: Tensor) -> Tensor:
        if self.rank == 0:
            self.sent.append(tensor.clone())
            return tensor
        return self.sent.pop(0)


def batch_of(tree: bool, certain: bool, vocab: int = 11, rows: int = 9, seed: int = 0):
    rng = np.random.default_rng(seed)
    draft = random_draft(rng, rows, tree, vocab)
    logits = torch.from_numpy(rng.normal(size=(rows + draft.num_nodes, vocab)).astype(np.float32)) * 2
    if not certain:
        draft.probs = rng.dirichlet(np.ones(vocab), draft.num_nodes).astype(np.float32)
        if draft.parents is not None:  # siblings come from one distribution
            begin = np.repeat(np.cumsum(draft.counts) - draft.counts, draft.counts)
            first = {}
            for i, at in enumerate(zip(begin.tolist(), draft.parents.tolist())):
                draft.probs[i] = draft.probs[first.setdefault(at, i)]
    return logits, draft, rng


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("masks", [(0, 1.0, 0.0), (3, 0.9, 0.02)])
def test_emitted_tokens_and_logprobs(masks: tuple[int, float, float], tree: bool, certain: bool):
    """Accepted tokens, then one; log-probs of before the masks; nothing outside the masks; greedy rows greedy."""
    accepted = 0
    for seed in range(20):
        logits, draft, _ = batch_of(tree, certain, seed=seed)
        rows = sampling(len(logits), 0.9, *masks, seed=seed)
        of_row = np.repeat(np.arange(9), draft.counts + 1)
        rows.temperature[of_row == 4] = 0.0
        verdict, tokens, logprobs = unkeyed(logits, rows, draft, Sampler(CPU), SingleRank())
        assert tokens.dtype == np.int32 and logprobs.dtype == np.float32
        assert len(tokens) == len(logprobs) == verdict.counts.sum() == len(verdict.index)
        last = np.cumsum(verdict.counts) - 1
        is_last = np.zeros(len(tokens), bool)
        is_last[last] = True
        assert tokens[~is_last].tolist() == draft.tokens[verdict.accepted].tolist()
        scale = np.where(rows.temperature > 0, rows.temperature, 1)[verdict.index]
        scores = logits[torch.from_numpy(verdict.index)] / torch.from_numpy(scale)[:, None]
        expected = scores.log_softmax(-1).numpy()[np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(logprobs, expected, atol=1e-6)
        allowed = policy_distribution(logits, rows).numpy()
        assert (allowed[verdict.index, tokens] > 0).all()
        greedy = rows.temperature[verdict.index] == 0
        assert tokens[greedy].tolist() == logits.argmax(-1).numpy()[verdict.index][greedy].tolist()
        accepted += int(verdict.accepted.sum())
    assert accepted > 5


@pytest.mark.parametrize("tree", [False, True])
def test_large_batches_are_verified_in_parts(tree: bool, monkeypatch: pytest.MonkeyPatch):
    logits, draft, _ = batch_of(tree, certain=False, rows=12)
    rows = sampling(len(logits), 0.9, 5)
    whole = unkeyed(logits, rows, draft, Sampler(CPU), SingleRank())
    for most in (1, 40, 200):
        monkeypatch.setattr(unkeyed_module, "_ELEMENTS_AT_ONCE", most)
        parts = unkeyed(logits, rows, draft, Sampler(CPU), SingleRank())
        for name in ("counts", "index", "accepted", "reached"):
            assert getattr(parts[0], name).tolist() == getattr(whole[0], name).tolist()
        assert parts[1].tolist() == whole[1].tolist()
        np.testing.assert_allclose(parts[2], whole[2], atol=1e-6)


def test_the_engines_arrays_are_left_alone():
    logits, draft, _ = batch_of(False, certain=False)
    rows = sampling(len(logits), 0.9, 3, 0.9)
    before = (logits.clone(), rows.temperature.copy(), rows.top_k.copy(), rows.top_p.copy(), rows.is_masked)
    unkeyed(logits, rows, draft, Sampler(CPU), SingleRank())
    assert torch.equal(before[0], logits) and before[4] == rows.is_masked
    for old, new in zip(before[1:4], (rows.temperature, rows.top_k, rows.top_p)):
        assert np.array_equal(old, new)


def test_rank_zero_decides():
    logits, draft, rng = batch_of(False, certain=False)
    rows = sampling(len(logits))
    pair = Pair()
    first = unkeyed(logits, rows, draft, Sampler(CPU), pair)
    other = torch.from_numpy(rng.normal(size=tuple(logits.shape)).astype(np.float32)) * 5
    alone = unkeyed(other, rows, draft, Sampler(CPU), SingleRank())
    pair.rank = 1
    second = unkeyed(other, rows, draft, Sampler(CPU), pair)
    assert second[0].index.tolist() == first[0].index.tolist() != alone[0].index.tolist()
    assert second[1].tolist() == first[1].tolist() and second[2].tolist() == first[2].tolist()


def test_rows_do_not_touch_each_other():
    """A row's verdict is the same alone and in the batch."""
    logits, draft, _ = batch_of(False, certain=False)
    rows = sampling(len(logits))
    verdict, tokens, _ = unkeyed(logits, rows, draft, Sampler(CPU), SingleRank())
    fed = node = at = 0
    for row, count in enumerate(draft.counts.tolist()):
        mine = slice(node, node + count)
        alone = draft_of([count], draft.tokens[mine], probs=draft.probs[mine])
        part = slice(fed, fed + count + 1)
        one, token, _ = unkeyed(logits[part], rows.part(part), alone, Sampler(CPU), SingleRank())
        emitted = int(verdict.counts[row])
        assert one.counts.tolist() == [emitted]
        assert token.tolist() == tokens[at : at + emitted].tolist()
        node, fed, at = node + count, fed + count + 1, at + emitted
