"""The rollout of all replicas, from one change of their running requests to the next. Torch-free.

While the same requests run, a step costs the same but for growing contexts. So between two changes of a replica's
running requests all tokens are drawn at once, at the rate that the production selector reached (`decisions`). At each
change the production scheduler decides, in quanta of some tokens. The replica whose virtual time is the earliest comes
next; before it goes on it fetches prompts as in a run (`data.prompt_queue`).

    replica 0   4 requests ====|3 ========|fetch: 4 =====|...        seconds between two changes of B running requests
    replica 1   4 requests ==|3 ==|fetch: 4 ======|3 ====|...        = tokens until the next change * rate(B, context)

Approximated: all running requests draw equally many tokens (in truth drafts are right more often for some), prompts
are computed before decoding begins, and a rate is the mean of some steps. `tests/unit/sim/test_rollouts.py` compares
it with a replica that is simulated token by token. Legend: R requests of a replica, P prompts, n samples of a prompt.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count

import numpy as np

from megatron_tlt.config.sim import SimConfig
from megatron_tlt.data.prompt_queue import PromptQueue, first_share
from megatron_tlt.sim.cost_model import CostModel
from megatron_tlt.sim.decisions import RateTable
from megatron_tlt.sim.scheduling import add_group, new_scheduler, plain_result, run_result
from megatron_tlt.types import Prompt

_QUANTA = 512  # of tokens that the longest response is divided into between the scheduler's decisions


@dataclass(slots=True)
class ReplicaRollout:
    """Arrays by event, in order of time; the first is at 0."""

    times: np.ndarray  # float64 [E], seconds since the rollout began
    running: np.ndarray  # int64 [E], requests that decode or are to, from then on; the last is 0
    lengths: np.ndarray  # int64 [R], ascending
    accept_length: float = 0.0
    preemptions: int = 0

    @property
    def seconds(self) -> float:
        """Until the last response's end; 0 without requests."""
        return float(self.times[-1])


class Rollouts:
    """Rollouts of replicas that are alike."""

    def __init__(self, config: SimConfig, costs: CostModel, num_replicas: int):
        self._config, self._costs, self._num_replicas = config, costs, num_replicas

    def run(self, lengths: np.ndarray, table: RateTable) -> list[ReplicaRollout]:
        """Rollouts of all replicas; the responses have `lengths` int [P, n] tokens."""
        rollout, num_replicas = self._config.rollout, self._num_replicas
        prompts = [Prompt(i, str(i), (), "") for i in range(len(lengths))]
        pulls = rollout.schedule == "pull"
        share = first_share(
            len(prompts), num_replicas, lengths.shape[1], rollout.max_running_requests if pulls else None
        )
        tickets = count()
        replicas = [
            _Replica(
                self._config,
                self._costs,
                table,
                lengths,
                PromptQueue(prompts, i, num_replicas, share, lambda: next(tickets)),
                -(-len(prompts) // num_replicas),
            )
            for i in range(num_replicas)
        ]
        order = [(0.0, i) for i in range(num_replicas)]  # a heap
        while order:
            _, i = order[0]
            if replicas[i].advance():
                heapq.heapreplace(order, (replicas[i].now, i))
            else:
                heapq.heappop(order)
        return [replica.result() for replica in replicas]


class _Replica:
    """One engine in one rollout: the production scheduler under a virtual clock."""

    def __init__(
        self,
        config: SimConfig,
        costs: CostModel,
        table: RateTable,
        lengths: np.ndarray,
        prompts: PromptQueue,
        share: int,
    ):
        """`share`: prompts of each replica if all got equally many."""
        self._costs, self._table, self._lengths, self._prompts = costs, table, lengths, prompts
        self._prompt_tokens = config.workload.prompt_tokens
        self._quantum = quantum_of(config.rollout.max_tokens)
        self._most = min(config.rollout.max_running_requests, share * lengths.shape[1])
        self._scheduler = new_scheduler(config, self._quantum, self._most)
        self.now = 0.0
        self._times: list[float] = []
        self._running: list[int] = []
        self._tokens: list[int] = []  # quanta of each step

    def advance(self) -> bool:
        """Fetches prompts and computes until the next change. Returns whether the replica has work left."""
        scheduler, table = self._scheduler, self._table
        self._fetch()
        live = scheduler.num_running + scheduler.num_waiting
        self._times.append(self.now)
        self._running.append(live)
        if scheduler.is_idle:
            return False
        batch = scheduler.schedule()
        decoding, rows = batch.num_decode, scheduler.rows
        seconds, advance = 0.0, 1
        if batch.is_decode:
            advance = int((rows.limit[:decoding] - rows.output_len[:decoding]).min())
            fits = scheduler.reserve(np.full(decoding, advance - 1, np.int32))
            advance = int(fits.min()) + 1
        if decoding:
            context = self._quantum * (float(rows.context_lens[:decoding].mean()) + advance / 2)
            seconds = advance * self._quantum * table.at(decoding, context)
        if batch.is_decode:
            result = run_result(np.full(decoding, advance))
        else:
            result = plain_result(batch.num_draws)
            seconds += self._costs.prefill(self._quantum * (batch.num_tokens - decoding))
        scheduler.commit(batch, result)
        self._tokens.append(len(result.tokens))
        self.now += seconds
        return True

    def _fetch(self) -> None:
        """As `rollout.engine.Engine.run`: while fewer requests live than can run, unless one is queued."""
        scheduler = self._scheduler
        if scheduler.has_queue:
            return
        while scheduler.num_running + scheduler.num_waiting < self._most:
            prompt = next(self._prompts, None)
            if prompt is None:
                return
            lengths = self._lengths[prompt.prompt_id]
            add_group(scheduler, prompt.prompt_id, lengths, self._prompt_tokens, self._quantum)

    def result(self) -> ReplicaRollout:
        """The finished rollout."""
        fetched = [prompt.prompt_id for prompt in self._prompts.fetched]
        running = np.array(self._running)
        busy = np.minimum(running[:-1], self._most)
        return ReplicaRollout(
            np.array(self._times),
            running,
            np.sort(self._lengths[fetched].ravel()),
            _accept_length(self._table, busy, np.array(self._tokens, np.float64)),
            self._scheduler.num_preemptions,
        )


def quantum_of(max_tokens: int) -> int:
    """Tokens of a quantum in which the scheduler counts."""
    return max(1, max_tokens // _QUANTA)


def _accept_length(table: RateTable, running: np.ndarray, tokens: np.ndarray) -> float:
    """Mean over the engine steps that drafted; `tokens` were emitted at each of `running`."""
    accepted = table.accept_length[running]
    drafted = tokens * (accepted > 0) * table.speculating[running]
    rows = float((drafted[accepted > 0] / accepted[accepted > 0]).sum())
    return float(drafted.sum()) / rows if rows else 0.0
