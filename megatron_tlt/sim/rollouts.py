"""The rollout of all replicas, from one change of their running requests to the next. Torch-free.

While the same requests run, a step costs the same but for growing contexts. So between two changes of a replica's
running requests all tokens are drawn at once, at the rate that the production selector reached (`decisions`). At each
change the production scheduler decides, in quanta of some tokens. The replica whose virtual time is the earliest comes
next; before it goes on it fetches prompts as in a run (`data.prompt_queue`).

    replica 0   4 requests ====|3 ========|fetch: 4 =====|...        seconds between two changes of B running requests
    replica 1   4 requests ==|3 ==|fetch: 4 ======|3 ====|...        = tokens until the next change * rate(B, context)

A request that stops matching its pre-rolled response, or has come to its end, is a change too (`drift`).

Approximated: requests alike draw equally many tokens (in truth drafts are right more often for some), prompts
are computed before decoding begins, and a rate is the mean of some steps. `tests/unit/sim/test_rollouts.py` compares
it with a replica that is simulated token by token. Legend: R requests of a replica, P prompts, n samples of a prompt.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from megatron_tlt.config.sim import SimConfig
from megatron_tlt.data.prompt_queue import PromptQueue, first_share
from megatron_tlt.sim.cost_model import Roofline
from megatron_tlt.sim.decisions import RateTable
from megatron_tlt.sim.drift import Drift
from megatron_tlt.sim.scheduling import add_group, new_scheduler, plain_result, run_result
from megatron_tlt.types import Prompt

_QUANTA = 512  # of tokens that the longest response is divided into between the scheduler's decisions
_EXACT = 1e-6  # quanta by which a sum may be off


@dataclass(slots=True)
class ReplicaRollout:
    """A rollout that is over."""

    seconds: float  # until the last response's end; 0 without requests
    lengths: np.ndarray  # int64 [R], ascending
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class PreRolled:
    """Tokens of the responses of a step, int64 [P, n] each."""

    there: np.ndarray  # pre-rolled
    matching: np.ndarray  # of these, before the first mismatch

    def in_quanta(self, lengths: np.ndarray, quantum: int) -> tuple[np.ndarray, np.ndarray]:
        """Both in quanta, float64 [P * n]; a response that is there to its end in as many as it has."""
        whole = np.ceil(lengths / quantum)
        there, matching = (
            np.where(tokens < lengths, np.rint(tokens / quantum), whole).ravel()
            for tokens in (self.there, self.matching)
        )
        return there, matching


class Rollouts:
    """Rollouts of replicas that are alike."""

    def __init__(self, config: SimConfig, costs: Roofline, num_replicas: int):
        self._config, self._costs, self._num_replicas = config, costs, num_replicas

    def run(self, lengths: np.ndarray, table: RateTable, pre_rolled: PreRolled | None = None) -> list[ReplicaRollout]:
        """Rollouts of all replicas; the responses have `lengths` int [P, n] tokens."""
        rollout, (num_prompts, samples) = self._config.rollout, lengths.shape
        pulls = rollout.schedule == "pull"
        room = rollout.max_running_requests if pulls else None
        share = first_share(num_prompts, self._num_replicas, samples, room)
        most = self.most(num_prompts, samples)
        starts = [0.0] * self._num_replicas
        replicas = self._drive(lengths, range(num_prompts), table, share, most, starts, math.inf, pre_rolled)
        return [replica.result() for replica in replicas]

    def pre_roll(
        self,
        lengths: np.ndarray,
        order: Sequence[int],
        table: RateTable,
        starts: Sequence[float],
        until: float,
        pre_rolled: PreRolled | None,
    ) -> tuple[np.ndarray, list[float]]:
        """What replicas that begin at `starts` (inf: never) decode before `until` of the prompts in this order.

        Returns tokens int64 [P, n], and when each replica ends.
        """
        most = self.most(self._config.workload.prompts_per_step, lengths.shape[1])
        replicas = self._drive(lengths, order, table, 0, most, starts, until, pre_rolled)
        tokens = np.zeros(lengths.shape, np.int64)
        for replica in replicas:
            for prompt in replica.fetched:
                tokens[prompt] = replica.tokens_of(prompt)
        return tokens, [min(replica.now, until) for replica in replicas]

    def most(self, num_prompts: int, samples: int) -> int:
        """Requests that a replica has at once: its share of a step, as far as the engine holds them."""
        share = -(-num_prompts // self._num_replicas) * samples
        return min(self._config.rollout.max_running_requests, share)

    def _drive(
        self,
        lengths: np.ndarray,
        order: Sequence[int],
        table: RateTable,
        share: int,
        most: int,
        starts: Sequence[float],
        until: float,
        pre_rolled: PreRolled | None,
    ) -> list[_Replica]:
        """Replicas after their rollouts, each with `share` prompts of its own and `most` requests at once."""
        prompts = [Prompt(i, str(i), (), "") for i in order]
        tickets = count()
        replicas = []
        for i, start in enumerate(starts):
            queue = PromptQueue(prompts, i, len(starts), share, lambda: next(tickets))
            replicas.append(_Replica(self._config, self._costs, table, lengths, queue, most, start, until, pre_rolled))
        heap = [(start, i) for i, start in enumerate(starts) if start < until]
        heapq.heapify(heap)
        while heap:
            _, i = heap[0]
            if replicas[i].advance():
                heapq.heapreplace(heap, (replicas[i].now, i))
            else:
                heapq.heappop(heap)
        return replicas


class _Replica:
    """One engine in one rollout: the production scheduler under a virtual clock."""

    def __init__(
        self,
        config: SimConfig,
        costs: Roofline,
        table: RateTable,
        lengths: np.ndarray,
        prompts: PromptQueue,
        most: int,
        start: float,
        until: float,
        pre_rolled: PreRolled | None,
    ):
        self._costs, self._table, self._lengths, self._prompts = costs, table, lengths, prompts
        self._prompt_tokens = config.workload.prompt_tokens
        self._quantum = quantum_of(config.rollout.max_tokens)
        self._until, self._scheduler = until, new_scheduler(config, self._quantum, most)
        self._drift, self._position = Drift(config.pre_rollouts), np.zeros(lengths.size)  # quanta, by request
        self._pre_rolled = None if pre_rolled is None else pre_rolled.in_quanta(lengths, self._quantum)
        self._scheduler.separates_prefill = pre_rolled is not None
        self.now = start

    @property
    def fetched(self) -> list[int]:
        """The prompts that this replica has taken."""
        return [prompt.prompt_id for prompt in self._prompts.fetched]

    def tokens_of(self, prompt: int) -> np.ndarray:
        """Tokens of its responses so far, int64 [n]."""
        n = self._lengths.shape[1]
        decoded = np.floor(self._position[prompt * n : (prompt + 1) * n] * self._quantum + _EXACT)
        return np.minimum(self._lengths[prompt], decoded.astype(np.int64))

    def advance(self) -> bool:
        """Fetches prompts and computes until the next change. Returns whether the replica goes on."""
        scheduler, table = self._scheduler, self._table
        self._fetch()
        if scheduler.is_idle:
            return False
        batch = scheduler.schedule()
        decoding, rows = batch.num_decode, scheduler.rows
        if batch.is_decode:
            seconds, emitted = self._decode(decoding)
            result = run_result(emitted)
        else:
            result = plain_result(batch.num_draws)
            seconds = self._costs.prefill(self._quantum * (batch.num_tokens - decoding))
            if decoding:
                context = self._quantum * (float(rows.context_lens[:decoding].mean()) + 0.5)
                seconds += self._quantum * table.at(decoding, context)[0]
        self.now += seconds
        if self.now > self._until - _EXACT:
            return False
        scheduler.commit(batch, result)
        return True

    def _decode(self, decoding: int) -> tuple[float, np.ndarray]:
        """Seconds until the next change, and the quanta int64 [B] that are drawn until then. Reserves their blocks."""
        rows, quantum = self._scheduler.rows, self._quantum
        order = [request.order for request in rows.requests]
        whole = rows.output_len[:decoding].astype(np.int64)
        before = np.maximum(self._position[order], whole)
        end = rows.limit[:decoding].astype(np.float64)
        matching = parted = np.zeros(decoding, np.bool_)
        if self._pre_rolled is not None:
            there, alike = (tokens[order] for tokens in self._pre_rolled)
            matching, parted = before < alike, (before >= alike) & (before < there)
            end = np.where(matching, alike, np.where(parted, there, end))
        context = quantum * (float(rows.context_lens[:decoding].mean()) + float((end - before).min()) / 2)
        each = quantum * self._seconds_a_token(context, matching, parted)
        seconds = min(float(((end - before) * each).min()), self._until - self.now)
        position = _snapped(before + seconds / each)
        wanted = np.floor(position).astype(np.int64) - whole
        fits = self._scheduler.reserve(wanted.astype(np.int32) - 1) + 1
        if (short := fits < wanted).any():
            seconds *= float(((whole + fits - before) / (position - before))[short].min())
            position = _snapped(before + seconds / each)
            wanted = np.floor(position).astype(np.int64) - whole
        self._position[order] = position
        return seconds, wanted

    def _seconds_a_token(self, context: float, matching: np.ndarray, parted: np.ndarray) -> np.ndarray | float:
        """Of each running request, float64 [B]; those of `matching` and `parted` have pre-rolled responses."""
        at, drift = self._table.at, self._drift
        running, alike, behind = self._scheduler.num_running, int(matching.sum()), int(parted.sum())
        seconds, tokens, drafted = at(running, context, alike + behind)
        if not alike + behind:
            return seconds
        _, share = drift.tokens_parted(drafted, tokens)
        seconds, tokens, drafted = at(running, context, alike + share * behind)
        step, (of_parted, _) = seconds * tokens, drift.tokens_parted(drafted, tokens)
        of_others = np.where(parted, step / of_parted, seconds)
        return np.where(matching, step / drift.tokens_matching(drafted, tokens), of_others)

    def _fetch(self) -> None:
        """As `rollout.drive.Drive` does."""
        while self._scheduler.has_room and (prompt := next(self._prompts, None)) is not None:
            index = prompt.prompt_id
            add_group(self._scheduler, index, self._lengths[index], self._prompt_tokens, self._quantum)

    def result(self) -> ReplicaRollout:
        """The finished rollout."""
        lengths = np.sort(self._lengths[self.fetched].ravel())
        return ReplicaRollout(self.now, lengths, self._scheduler.num_preemptions)


def _snapped(quanta: np.ndarray) -> np.ndarray:
    """Whole ones without the error of a sum."""
    nearest = np.rint(quanta)
    return np.where(np.abs(quanta - nearest) < _EXACT, nearest, quanta)


def quantum_of(max_tokens: int) -> int:
    """Tokens of a quantum in which the scheduler counts."""
    return max(1, max_tokens // _QUANTA)
