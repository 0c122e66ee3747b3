"""From scored samples to a training batch: the step's table, the placement of sequences, log-probs, advantages.

The placement is computed from the same table of all ranks' samples on every rank, so all ranks agree without a
controller. A sample without a gradient (`Algorithm.has_gradient`, no losses of routers) has a row in the table, counts
in its mini-batch's divisor, and goes to no replica. Legend: N samples to train on, S samples that the step scored, both
over all ranks (S > N with dynamic sampling), R response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from megatron_tlt.algorithms.base import RewardTable
from megatron_tlt.data.packing import balance
from megatron_tlt.distributed.exchange import gather_columns, gather_large, redistribute, sum_over_replicas
from megatron_tlt.rollout.speculation.history import readable_tokens
from megatron_tlt.types import (
    PastResponse,
    SampleGroup,
    TrainBatch,
    TrainSequence,
    Trajectory,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatron_tlt.actor.policy import MegatronPolicy
    from megatron_tlt.algorithms.base import Algorithm
    from megatron_tlt.distributed.world import World
    from megatron_tlt.interfaces import RolloutBackend
    from megatron_tlt.types import Drawn, Prompt, Sample

_COLUMNS = {
    "prompt_id": np.int64,
    "sample_index": np.int64,
    "value": np.float64,
    "reward": np.float64,
    "correct": np.bool_,
    "length": np.int64,
    "truncated": np.bool_,
    "aborted": np.bool_,
    "cost": np.int64,
    "off_policy": np.bool_,
    "is_trained": np.bool_,
}
_TABLE = ("prompt_id", "sample_index", "reward", "length", "truncated", "aborted")  # of `RewardTable`
_SCORED = ("value", "reward", "correct", "length", "truncated", "aborted")  # of `ScoredRows`


def as_columns(kinds: Mapping[str, type], rows: Sequence[tuple[object, ...]]) -> dict[str, np.ndarray]:
    """The rows' fields as arrays of the types in `kinds`, by its names in order."""
    return {name: np.array([row[i] for row in rows], dtype=kind) for i, (name, kind) in enumerate(kinds.items())}


def group_samples(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[SampleGroup]:
    """Samples under their prompts, in the prompts' order, by sample index."""
    by_prompt: dict[int, list[Sample]] = {p.prompt_id: [] for p in prompts}
    for sample in samples:
        by_prompt[sample.prompt_id].append(sample)
    return [SampleGroup(p, sorted(by_prompt[p.prompt_id], key=lambda s: s.sample_index)) for p in prompts]


def share_responses(world: World, backend: RolloutBackend, groups: Sequence[SampleGroup]) -> None:
    """Adds all ranks' scored responses, also those that are not trained on, to the history of every engine: any of them
    may serve the prompt when it comes again. Tokens that no history keeps stay where they are.

    Collective.
    """
    most = backend.history_responses
    mine = [response for group in groups for response in readable_tokens(_past_responses(group), most)]
    # Lengths alone are small: one all-gather instead of a broadcast a rank.
    parts = gather_large(world, mine or None) if most else world.all_gather_object(mine)
    responses = [response for part in parts for response in part]
    responses.sort(key=lambda a: a.prompt_id)  # the order must not depend on the number of ranks
    backend.remember(responses)


def _past_responses(group: SampleGroup) -> list[PastResponse]:
    name, prompt_id = group.prompt.dataset_id, group.prompt.prompt_id
    return [
        PastResponse(name, np.asarray(sample.token_ids, np.int32), reward.value, prompt_id)
        for sample, reward in zip(group.samples, group.rewards, strict=True)
    ]


@dataclass(frozen=True)
class ScoredRows:
    """One row a sample that the step scored, [S] each, over all ranks: those to train on, and those of groups that
    dynamic sampling left out.
    """

    value: np.ndarray  # rewards before overlong shaping
    reward: np.ndarray  # and after it
    correct: np.ndarray
    length: np.ndarray  # response tokens that the policy drew
    truncated: np.ndarray
    aborted: np.ndarray  # of these, rewards do not count
    is_shaped: bool  # overlong shaping is configured

    def metrics(self) -> dict[str, float]:
        """Statistics of rewards and lengths."""
        length, judged = self.length, ~self.aborted
        row = {"rollout/samples": float(len(length))}
        if len(length):
            row |= {
                "reward/accuracy": float(self.correct[judged].mean()) if judged.any() else 0.0,
                "length/mean": float(length.mean()),
                "length/median": float(np.median(length)),
                "length/p95": float(np.quantile(length, 0.95)),
                "length/max": float(length.max()),
                "length/truncated": float(self.truncated.mean()),
            }
        if judged.any():
            value = self.value[judged]
            row |= {"reward/mean": float(value.mean()), "reward/std": float(value.std())}
            if self.is_shaped:
                row["reward/overlong_penalty"] = float((value - self.reward[judged]).mean())
        return row


@dataclass(frozen=True)
class StepTable:
    """One row a sample to train on, over all ranks, sorted by (prompt_id, sample_index); the same on every rank.

    `mini_batch` and `dp_rank` (int64 [N]) say where each row is trained; `dp_rank` is -1 for rows without a gradient.
    """

    rewards: RewardTable
    mini_batch: np.ndarray
    dp_rank: np.ndarray
    scored: ScoredRows

    def members(self, mini_batch: int) -> np.ndarray:
        """Rows of one mini-batch, int64."""
        return np.flatnonzero(self.mini_batch == mini_batch)

    def metrics(self) -> dict[str, float]:
        """Statistics of rewards and lengths of all that was scored, and how much of the table the update left out."""
        length, row = self.rewards.length, self.scored.metrics()
        if len(length):
            skipped = float(length[self.dp_rank < 0].sum())
            row |= {"update/skipped_tokens": skipped, "update/skipped_share": skipped / max(1, int(length.sum()))}
        return row


def place(
    prompt_id: np.ndarray, costs: np.ndarray, has_gradient: np.ndarray, mini_batches: int, full: int, dp: int
) -> tuple[np.ndarray, np.ndarray]:
    """(mini-batch, replica) of every row: whole prompts per mini-batch, tokens balanced over replicas. Pure.

    `costs` are tokens of prompt and response, int64 [N]; `full` the prompts of a full step, whose `mini_batches` have
    as many each. A step of fewer fills fewer mini-batches of that size, for the learning rate is that of a full one;
    the last ones are empty. Rows without a gradient belong to a mini-batch and to no replica (-1).
    """
    prompts = np.unique(prompt_id)
    mini_batch = np.searchsorted(prompts, prompt_id) * mini_batches // max(len(prompts), full)
    dp_rank = np.full(len(prompt_id), -1, dtype=np.int64)
    for index in range(mini_batches):
        members = np.flatnonzero((mini_batch == index) & has_gradient)
        dp_rank[members] = balance(costs[members].tolist(), dp)
    return mini_batch, dp_rank


class BatchAssembler:
    """Turns scored groups into this replica's training batch."""

    def __init__(
        self, world: World, policy: MegatronPolicy, algorithm: Algorithm, temperature: float, prompts_per_step: int
    ):
        """`temperature` is that of the rollout."""
        self._world, self._policy, self._dims, self._algorithm = world, policy, policy.dims, algorithm
        self._temperature, self._prompts_per_step = temperature, prompts_per_step
        self._mini_batches = algorithm.config.mini_batches
        self._sum = partial(sum_over_replicas, world, policy.dims)

    def exchange(
        self, groups: Sequence[SampleGroup], scored: Sequence[SampleGroup]
    ) -> tuple[StepTable, list[list[TrainSequence]]]:
        """The step's table, and this replica's sequences with a gradient by mini-batch, from this rank's `groups` to
        train on and all that were `scored`. Collective.
        """
        table = self._gather_table({group.prompt.prompt_id for group in groups}, scored)
        ranks = [self._dims.replica_ranks(dp) for dp in range(self._dims.dp)]
        row_of = table.rewards.row_of()
        outgoing = []
        for group, sample in [(g, sample) for g in groups for sample in g.samples]:
            row = row_of[(sample.prompt_id, sample.sample_index)]
            if (dp := int(table.dp_rank[row])) >= 0:
                trajectory = Trajectory.of(group.prompt.token_ids, sample)
                outgoing.append(((int(table.mini_batch[row]), trajectory), ranks[dp]))
        mine = redistribute(self._world, outgoing)
        mine.sort(key=lambda item: (item[1].prompt_id, item[1].sample_index))
        return table, [[self._sequence(t) for at, t in mine if at == i] for i in range(self._mini_batches)]

    def _sequence(self, trajectory: Trajectory) -> TrainSequence:
        """The trajectory, with `algorithm.mask_off_policy` without the loss of tokens that earlier policies drew."""
        sequence = TrainSequence.of(trajectory)
        if self._algorithm.config.mask_off_policy:
            sequence.loss_mask *= token_ages(trajectory.drawn_by, self._policy.policy_version) == 0
        return sequence

    def build_batch(self, parts: list[list[TrainSequence]], table: StepTable) -> TrainBatch:
        """Advantages, masks and divisors. Collective. Mutates the sequences.

        `parts`: this replica's sequences by mini-batch.
        """
        flat = [sequence for part in parts for sequence in part]
        token_kl: list[np.ndarray] | None = None
        rewards = table.rewards
        if self._algorithm.needs_token_kl:  # k1, the estimator for a KL to the reference in the reward
            pairs = zip(self._logprobs(flat, "policy"), self._logprobs(flat, "reference"), strict=True)
            differences = [policy - reference for policy, reference in pairs]
            token_kl = [np.where(s.trajectory.drawn, d, 0.0) for s, d in zip(flat, differences, strict=True)]
            rewards = self._with_kl(table, flat, token_kl)
        metrics = self._algorithm.assign(flat, rewards, token_kl, self._sum)
        divisors = [self._algorithm.denominator(rewards, table.members(i)) for i in range(len(parts))]
        return TrainBatch(parts, divisors, self._temperature, metrics)

    def _logprobs(self, flat: list[TrainSequence], which: Literal["policy", "reference"]) -> list[np.ndarray]:
        return self._policy.logprobs(flat, self._temperature, which=which)

    def _gather_table(self, trained: set[int], scored: Sequence[SampleGroup]) -> StepTable:
        """The step's table from every rank's scored groups and prompts to train on. Collective."""
        rows = [
            (
                sample.prompt_id,
                sample.sample_index,
                reward.value,
                shaped,
                reward.correct,
                sample.num_drawn,
                sample.is_truncated,
                sample.finish_reason == "abort",
                len(group.prompt.token_ids) + len(sample.token_ids),
                sample.policy_version < self._policy.policy_version,
                sample.prompt_id in trained,
            )
            for group in scored
            for sample, reward, shaped in zip(group.samples, group.rewards, self._algorithm.shaped(group), strict=True)
        ]
        columns = gather_columns(self._world, as_columns(_COLUMNS, rows))
        order = np.lexsort((columns["sample_index"], columns["prompt_id"]))
        columns = {name: values[order] for name, values in columns.items()}
        is_shaped = self._algorithm.config.overlong_buffer > 0
        of_step = ScoredRows(is_shaped=is_shaped, **{name: columns[name] for name in _SCORED})
        columns = {name: values[columns["is_trained"]] for name, values in columns.items()}
        kl_sum = np.zeros(len(columns["reward"]))
        return self._placed(RewardTable(kl_sum=kl_sum, **{name: columns[name] for name in _TABLE}), columns, of_step)

    def _placed(self, rewards: RewardTable, columns: Mapping[str, np.ndarray], scored: ScoredRows) -> StepTable:
        """The table with the place of each row; `columns`: its costs, and which rows earlier policies drew."""
        has_gradient = self._algorithm.has_gradient(rewards)
        if self._algorithm.config.mask_off_policy and not self._algorithm.needs_token_kl:
            has_gradient &= ~columns["off_policy"]  # all of such a response's tokens are masked
        if self._policy.actor.has_router_losses:
            has_gradient |= ~rewards.aborted
        counts = self._mini_batches, self._prompts_per_step, self._dims.dp
        mini_batch, dp_rank = place(rewards.prompt_id, columns["cost"], has_gradient, *counts)
        return StepTable(rewards, mini_batch, dp_rank, scored)

    def _with_kl(self, table: StepTable, flat: Sequence[TrainSequence], token_kl: Sequence[np.ndarray]) -> RewardTable:
        row_of = table.rewards.row_of()
        kl_sum = np.zeros(len(table.mini_batch))
        for sequence, kl in zip(flat, token_kl, strict=True):
            trajectory = sequence.trajectory
            kl_sum[row_of[(trajectory.prompt_id, trajectory.sample_index)]] = kl.sum(dtype=np.float64)
        return replace(table.rewards, kl_sum=self._sum(kl_sum))


def token_ages(drawn_by: Sequence[Drawn], version: int) -> np.ndarray:
    """Int64 [R]: updates of the policy between the one that drew each response token and `version`."""
    versions, counts = zip(*drawn_by, strict=True)
    return version - np.repeat(np.array(versions, np.int64), counts)
