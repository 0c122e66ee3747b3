"""Every algorithm's loss and gradient against a loop over responses and tokens, from its paper (float64).

The loop is the formula over the tokens that the policy drew, without packing, masks, weights or denominators. R
response tokens, of which an environment gave some.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_tlt.algorithms.base import Algorithm, LossInputs, RewardTable
from megatron_tlt.algorithms.build import ALGORITHMS, build_algorithm
from megatron_tlt.config.algorithm import AlgorithmSection
from megatron_tlt.types import TrainSequence, Trajectory

NAMES = sorted(ALGORITHMS)
MAX_TOKENS = 8
CLIP = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}


@dataclass
class Response:
    """One response; tensors are float64 [R]."""

    prompt: int
    index: int
    reward: float
    truncated: bool
    logp: Tensor
    old: Tensor
    rollout: Tensor
    ref: Tensor
    entropy: Tensor
    kl: list[float] = field(default_factory=list)  # KL in the reward: k1 of the sampling policy
    given: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.logp)

    @property
    def drawn(self) -> list[int]:
        """Tokens of the policy."""
        return [t for t in range(len(self)) if not any(begin <= t < end for begin, end in self.given)]


def make_responses(seed: int, name: str, on_policy: bool = False, turns: bool = False) -> list[Response]:
    """With `turns`, tokens behind the first one are given at random."""
    rng = torch.Generator().manual_seed(seed)
    pick = random.Random(seed)
    drift = 2e-3 if name == "gspo" else 0.5  # wide enough that both clips act

    def noise(length: int, scale: float) -> Tensor:
        return torch.randn(length, generator=rng, dtype=torch.float64) * scale

    responses = []
    for prompt in (3, 7, 8, 20):
        for index in range(pick.choice([2, 3, 4])):
            length = pick.randint(1, MAX_TOKENS)
            logp = -noise(length, 1.0).abs()
            old = logp.clone() if on_policy else logp + noise(length, drift)
            ref = logp + noise(length, 0.4)
            kl = (old - ref).tolist()
            response = Response(
                prompt=prompt,
                index=index,
                reward=pick.choice([0.0, 0.25, 1.0]),
                truncated=pick.random() < 0.3,
                logp=logp.requires_grad_(),
                old=old,
                rollout=old + noise(length, 0.6),
                ref=ref,
                entropy=noise(length, 1.0).abs().requires_grad_(),
                kl=kl,
            )
            if turns:
                response.given = tuple((t, t + 1) for t in range(1, length) if pick.random() < 0.4)
                response.kl = [k if t in response.drawn else 0.0 for t, k in enumerate(kl)]
            responses.append(response)
    return responses


# The papers' formulas, token by token.


def naive_advantages(name: str, config: AlgorithmSection, responses: list[Response]) -> list[list[float]]:
    in_reward = config.kl_weight if config.kl_in == "reward" else 0.0
    if name == "reinforce_pp":
        returns = [[a.reward - in_reward * sum(a.kl[t:]) for t in range(len(a))] for a in responses]
        counted = [(a, r) for a, r in zip(responses, returns) if not (config.mask_truncated and a.truncated)]
        flat = [row[t] for a, row in counted for t in a.drawn]
        mean, std = statistics.fmean(flat), statistics.pstdev(flat)
        return [[(value - mean) / (std + config.advantage_eps) for value in row] for row in returns]
    reward = [a.reward - in_reward * sum(a.kl) for a in responses]
    result = []
    for i, a in enumerate(responses):
        group = [reward[j] for j, b in enumerate(responses) if b.prompt == a.prompt]
        others = [reward[j] for j, b in enumerate(responses) if b.prompt == a.prompt and j != i]
        if name == "rloo":
            value = reward[i] - statistics.fmean(others)
        elif name == "dr_grpo":
            value = reward[i] - statistics.fmean(group)
        else:
            value = (reward[i] - statistics.fmean(group)) / (statistics.stdev(group) + config.advantage_eps)
        result.append([value] * len(a))
        if name == "distill":  # reverse KL at the drawn token, and of no later one
            result[-1] = [value - config.kl_weight * float(a.old[t] - a.ref[t]) for t in range(len(a))]
    return result


def naive_kl(a: Response, t: int, estimator: str) -> Tensor:
    log_r = a.ref[t] - a.logp[t]
    return {"k1": -log_r, "k2": log_r * log_r / 2, "k3": log_r.exp() - 1 - log_r}[estimator]


def naive_terms(name: str, config: AlgorithmSection, a: Response, advantages: list[float]) -> list[Tensor]:
    """What every token of the policy adds to the objective (to be maximised)."""
    low, high = CLIP.get(name, (0.2, 0.2))
    low = config.ratio_clip_low if config.ratio_clip_low is not None else low
    high = config.ratio_clip_high if config.ratio_clip_high is not None else high
    terms = []
    for t in a.drawn:
        if name == "gspo":
            ratio = torch.exp(sum((a.logp[s] - a.old[s]) for s in a.drawn) / len(a.drawn))
            trust = math.exp(sum(float(a.old[s] - a.rollout[s]) for s in a.drawn) / len(a.drawn))
        else:
            ratio = torch.exp(a.logp[t] - a.old[t])
            trust = math.exp(float(a.old[t] - a.rollout[t]))
        trust = min(trust, config.importance_cap) if config.importance_cap else 1.0
        unclipped, clipped = ratio * advantages[t], ratio.clamp(1 - low, 1 + high) * advantages[t]
        term = trust * (unclipped if unclipped.item() < clipped.item() else clipped)
        if config.kl_in == "loss" and name != "distill":
            term = term - config.kl_weight * naive_kl(a, t, config.kl_estimator)
        terms.append(term + config.entropy_coef * a.entropy[t])
    return terms


def naive_loss(name: str, config: AlgorithmSection, responses: list[Response], members: set[int]) -> Tensor:
    """The loss of one mini-batch: of the prompts `members`, with advantages from the whole step."""
    advantages = naive_advantages(name, config, responses)
    chosen = [
        naive_terms(name, config, a, adv)
        for a, adv in zip(responses, advantages)
        if a.prompt in members and not (config.mask_truncated and a.truncated)
    ]
    tokens, count = sum(len(terms) for terms in chosen), len(chosen)
    if name in ("grpo", "gspo"):
        return -sum(sum(terms) / len(terms) for terms in chosen) / count
    if name in ("dapo", "reinforce_pp", "distill"):
        return -sum(sum(terms) for terms in chosen) / tokens
    if name == "dr_grpo":
        return -sum(sum(terms) / MAX_TOKENS for terms in chosen) / count
    return -sum(sum(terms) for terms in chosen) / count  # rloo


# The production path: table, assign, packs, denominator.


def make_table(responses: list[Response]) -> RewardTable:
    return RewardTable(
        prompt_id=np.array([a.prompt for a in responses]),
        sample_index=np.array([a.index for a in responses]),
        reward=np.array([a.reward for a in responses]),
        length=np.array([len(a) - sum(end - begin for begin, end in a.given) for a in responses]),
        truncated=np.array([a.truncated for a in responses]),
        aborted=np.zeros(len(responses), np.bool_),
        kl_sum=np.array([sum(a.kl) for a in responses]),
    )


def make_sequences(responses: list[Response]) -> list[TrainSequence]:
    return [
        TrainSequence.of(
            Trajectory(a.prompt, a.index, np.zeros(2 + len(a), np.int32), np.zeros(len(a), np.float32), a.given)
        )
        for a in responses
    ]


def pack(responses: list[Response], sequences: list[TrainSequence], with_old: bool, garbage: bool) -> LossInputs:
    """A micro-batch of whole responses; `garbage` adds masked rows full of inf and NaN before each."""
    bad = torch.tensor([math.inf, -math.inf, math.nan], dtype=torch.float64)
    masked = {"mask": torch.zeros_like(bad), "seg": torch.tensor([-1, 99, 0])}
    columns: dict[str, list[Tensor]] = defaultdict(list)
    for segment, (a, s) in enumerate(zip(responses, sequences)):
        ones = torch.ones(len(a), dtype=torch.float64)
        rows = {
            "logp": a.logp,
            "old": a.old,
            "rollout": a.rollout,
            "ref": a.ref,
            "entropy": a.entropy,
            "adv": torch.from_numpy(s.advantages).double(),
            "mask": torch.from_numpy(s.loss_mask).double(),
            "weight": ones * s.weight,
            "seg": ones.long() * segment,
        }
        for name, values in rows.items():
            columns[name] += [masked.get(name, bad), values] if garbage else [values]
    flat = {name: torch.cat(parts) for name, parts in columns.items()}
    return LossInputs(
        logprobs=flat["logp"],
        old_logprobs=flat["old"] if with_old else None,
        rollout_logprobs=flat["rollout"],
        ref_logprobs=flat["ref"],
        entropy=flat["entropy"],
        advantages=flat["adv"],
        mask=flat["mask"],
        weights=flat["weight"],
        segments=flat["seg"],
        num_segments=len(responses),
    )


def packs(seed: int, rows: list[int]) -> Iterator[list[int]]:
    """The rows in a random order, cut at random places."""
    rng = random.Random(seed)
    rows = rows[:]
    rng.shuffle(rows)
    while rows:
        size = rng.randint(1, 4)
        yield rows[:size]
        rows = rows[size:]


def production_loss(
    algorithm: Algorithm,
    responses: list[Response],
    members: set[int],
    seed: int = 0,
    with_old: bool = True,
    garbage: bool = True,
    only: np.ndarray | None = None,
) -> Tensor:
    """`only`, [responses], says which are trained on; the others are counted in the denominator."""
    table, sequences = make_table(responses), make_sequences(responses)
    token_kl = [np.array(a.kl) for a in responses] if algorithm.needs_token_kl else None
    algorithm.assign(sequences, table, token_kl, lambda x: x)
    rows = [i for i, a in enumerate(responses) if a.prompt in members]
    total = torch.zeros((), dtype=torch.float64)
    for chosen in packs(seed, [i for i in rows if only is None or only[i]]):
        inputs = pack([responses[i] for i in chosen], [sequences[i] for i in chosen], with_old, garbage)
        total = total + algorithm.loss(inputs)[0]
    return total / algorithm.denominator(table, np.array(rows))


def gradients(loss: Tensor, responses: list[Response]) -> list[Tensor]:
    leaves = [a.logp for a in responses] + [a.entropy for a in responses]
    if not loss.requires_grad:  # of no response
        return [torch.zeros_like(x) for x in leaves]
    found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found)]


def assert_same(mine: Tensor, naive: Tensor, responses: list[Response]) -> None:
    # Advantages and weights travel as float32, hence 1e-6 and not 1e-12.
    torch.testing.assert_close(mine, naive, rtol=2e-6, atol=2e-6)
    for a, b in zip(gradients(mine, responses), gradients(naive, responses)):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


VARIANTS = {
    "defaults": {},
    "mini_batches": {"mini_batches": 2},
    "kl_k1": {"kl_coef": 0.3, "kl_estimator": "k1"},
    "kl_k2": {"kl_coef": 0.3, "kl_estimator": "k2"},
    "kl_k3": {"kl_coef": 0.3, "kl_estimator": "k3"},
    "kl_reward": {"kl_coef": 0.3, "kl_in": "reward"},
    "entropy": {"entropy_coef": 0.05},
    "no_correction": {"importance_cap": 0.0},
    "masked": {"mask_truncated": True},
    "masked_kl_reward": {"mask_truncated": True, "kl_coef": 0.2, "kl_in": "reward"},
    "clips": {"ratio_clip_low": 0.05, "ratio_clip_high": 0.5},
}


# `check` refuses distillation with a KL in the reward.
PAIRS = [(name, variant) for name in NAMES for variant in VARIANTS if name != "distill" or "reward" not in variant]


@pytest.mark.parametrize("turns", [False, True], ids=["one-turn", "turns"])
@pytest.mark.parametrize(("name", "variant"), PAIRS)
def test_loss_and_gradient_equal_the_paper(name: str, variant: str, turns: bool) -> None:
    config, seed = AlgorithmSection(name=name, **VARIANTS[variant]), int(turns)
    responses = make_responses(seed, name, turns=turns)
    assert any(a.given for a in responses) == turns
    algorithm = build_algorithm(config, MAX_TOKENS)
    for members in [{3, 7}, {8, 20}] if config.mini_batches == 2 else [{3, 7, 8, 20}]:
        mine = production_loss(algorithm, responses, members, seed)
        assert_same(mine, naive_loss(name, config, responses, members), responses)


@pytest.mark.parametrize("scope", ["group", "batch"])
@pytest.mark.parametrize(("name", "variant"), PAIRS)
def test_rows_without_a_gradient_change_none(name: str, variant: str, scope: str) -> None:
    """Equal rewards in two groups or everywhere: which algorithm leaves out which responses, and that none is
    missed."""
    config = AlgorithmSection(name=name, **VARIANTS[variant])
    algorithm, responses = build_algorithm(config, MAX_TOKENS), make_responses(4, name)
    equal = {8, 20} if scope == "group" else {3, 7, 8, 20}
    for a in responses:
        a.reward = 0.1 if a.prompt in equal else float(a.index == 1)  # thirds of 0.1 do not add up to 0.1
    kept = algorithm.has_gradient(make_table(responses))
    # REINFORCE++ measures against the whole batch; a KL or an entropy in the objective has a gradient of its own.
    may_skip = config.kl_weight == 0 and not config.entropy_coef
    may_skip &= name != "reinforce_pp" or scope == "batch"
    masked = np.array([a.truncated and config.mask_truncated and config.kl_in == "loss" for a in responses])
    assert masked.any() == (variant == "masked")
    zero = np.array([may_skip and a.prompt in equal for a in responses])
    np.testing.assert_array_equal(kept, ~(zero | masked))
    members = {3, 7, 8, 20}
    whole = gradients(production_loss(algorithm, responses, members), responses)
    left = gradients(production_loss(algorithm, responses, members, only=kept), responses)
    for a, b in zip(left, whole):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    if not may_skip:  # and they could not have been left out
        wrong = production_loss(
            algorithm, responses, members, only=np.array([a.prompt not in equal for a in responses])
        )
        moved = [abs(a - b).max() for a, b in zip(gradients(wrong, responses), whole)]
        assert max(moved) > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_reinforce(name: str) -> None:
    config = AlgorithmSection(name=name)
    responses = make_responses(5, name, on_policy=True)
    mine = production_loss(build_algorithm(config, MAX_TOKENS), responses, {3, 7, 8, 20}, with_old=False)
    assert_same(mine, naive_loss(name, config, responses, {3, 7, 8, 20}), responses)


def test_metrics_are_sums_over_unmasked_tokens() -> None:
    algorithm = build_algorithm(AlgorithmSection(name="grpo", kl_coef=0.1, mask_truncated=True), MAX_TOKENS)
    responses = make_responses(2, "grpo")
    sequences = make_sequences(responses)
    algorithm.assign(sequences, make_table(responses), None, lambda x: x)
    metrics = algorithm.loss(pack(responses, sequences, True, True))[1]
    kept = [a for a in responses if not a.truncated]
    assert len(kept) < len(responses)
    ratio = torch.cat([a.old - a.rollout for a in kept])
    torch.testing.assert_close(metrics["mismatch_abs"], ratio.abs().sum())
    torch.testing.assert_close(metrics["mismatch_abs_max"], ratio.abs().max())
    torch.testing.assert_close(metrics["mismatch_k3"], (ratio.exp() - 1 - ratio).sum())
    torch.testing.assert_close(metrics["importance_weight"], ratio.exp().clamp(max=2).sum())
    assert metrics["importance_truncated"] == (ratio.exp() >= 2).sum() > 0
    moved, away = (torch.cat([x.detach() for x in of]) for of in zip(*((a.logp - a.old, a.ref - a.logp) for a in kept)))
    torch.testing.assert_close(metrics["policy_kl"], (moved.exp() - 1 - moved).sum())
    torch.testing.assert_close(metrics["kl_ref"], (away.exp() - 1 - away).sum())
    advantages = torch.cat([torch.from_numpy(s.advantages) for s, a in zip(sequences, responses) if not a.truncated])
    assert metrics["clip_low"] == ((moved.exp() < 0.8) & (advantages < 0)).sum() > 0
    assert metrics["clip_high"] == ((moved.exp() > 1.2) & (advantages > 0)).sum() > 0
    assert all(value.dim() == 0 and not value.requires_grad for value in metrics.values())


def test_an_engine_without_log_probs_is_neither_corrected_nor_compared() -> None:
    responses = make_responses(2, "gspo")
    sequences = make_sequences(responses)
    without = build_algorithm(AlgorithmSection(name="gspo"), MAX_TOKENS, has_engine_logprobs=False)
    uncorrected = build_algorithm(AlgorithmSection(name="gspo", importance_cap=0.0), MAX_TOKENS)
    without.assign(sequences, make_table(responses), None, lambda x: x)
    inputs = pack(responses, sequences, True, False)
    unknown = replace(inputs, rollout_logprobs=torch.full_like(inputs.rollout_logprobs, torch.nan))
    value, metrics = without.loss(unknown)
    assert value == uncorrected.loss(inputs)[0]
    assert not [name for name in metrics if name.startswith(("mismatch", "importance"))]


def test_distillation_reports_its_kl_and_leaves_out_that_to_a_reference() -> None:
    algorithm = build_algorithm(AlgorithmSection(name="distill", kl_coef=0.5), MAX_TOKENS)
    responses = make_responses(2, "distill")
    sequences = make_sequences(responses)
    algorithm.assign(sequences, make_table(responses), None, lambda x: x)
    metrics = algorithm.loss(pack(responses, sequences, with_old=True, garbage=True))[1]
    torch.testing.assert_close(metrics["teacher_kl"], torch.cat([a.old - a.ref for a in responses]).sum().detach())
    assert "kl_ref" not in metrics


@pytest.mark.parametrize("name", NAMES)
def test_a_micro_batch_with_nothing_to_train_is_zero(name: str) -> None:
    algorithm = build_algorithm(AlgorithmSection(name=name, mask_truncated=True), MAX_TOKENS)
    responses = make_responses(0, name)
    for a in responses:
        a.truncated = True
    sequences = make_sequences(responses)
    table = make_table(responses)
    algorithm.assign(sequences, table, None, lambda x: x)
    loss, metrics = algorithm.loss(pack(responses, sequences, True, True))
    assert loss == 0
    assert all(float(v) == 0 for v in metrics.values())
    assert all(not g.any() for g in gradients(loss, responses))
    assert algorithm.denominator(table, np.arange(len(responses))) == 0


def test_extreme_log_ratios_stay_finite() -> None:
    algorithm = build_algorithm(AlgorithmSection(kl_coef=0.1, mini_batches=2), MAX_TOKENS)
    responses = make_responses(0, "grpo")
    for a in responses:
        a.old = a.old - 500
        a.rollout = a.rollout - 900
        a.ref = a.ref + 700
    sequences = make_sequences(responses)
    algorithm.assign(sequences, make_table(responses), None, lambda x: x)
    loss, metrics = algorithm.loss(pack(responses, sequences, True, False))
    assert torch.isfinite(loss)
    assert all(torch.isfinite(v) for v in metrics.values())
    assert all(torch.isfinite(g).all() for g in gradients(loss, responses))
