"""What idle replicas have pre-rolled, as numbers of tokens: `trainer.pre_rollouts` in the simulation. Torch-free.

A response is taken to be as long under today's policy as under the one that it is pre-rolled for.
Legend: P prompts of a step, n samples of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_tlt.config.sim import SimConfig
from megatron_tlt.sim.decisions import RateTable
from megatron_tlt.sim.drift import Drift
from megatron_tlt.sim.rollouts import PreRolled, Rollouts
from megatron_tlt.sim.trace import Lengths

_AHEAD = 2  # steps whose prompts are pre-rolled
_TOKEN_BYTES = 4


class SimPreRollouts:
    """Of all replicas: `run` in the window behind a step, `take` before the next one."""

    def __init__(self, config: SimConfig, lengths: Lengths, rollouts: Rollouts):
        self._lengths, self._rollouts = lengths, rollouts
        self._last, self._seed = config.workload.steps - 1, config.workload.seed
        self._most = config.idle.pre_rollout_mib * 2**20 / _TOKEN_BYTES  # tokens of all replicas
        self._drift = Drift(config.pre_rollouts)
        self._there: dict[int, np.ndarray] = {}  # by step: tokens, int64 [P, n]
        self._made: dict[int, np.ndarray] = {}  # by step: the step whose policy drew them, int64 [P, n]
        self.exchanged = 0  # bytes, behind the last window

    def take(self, step: int) -> PreRolled | None:
        """What there is of `step`, whose rollout begins. Forgets it."""
        self.exchanged = 0
        if step not in self._there:
            return None
        taken = self._compared([step], step)
        del self._there[step], self._made[step]
        return taken

    def run(self, step: int, table: RateTable, starts: Sequence[float], until: float) -> list[float]:
        """Pre-rolls behind the rollout of `step`, on replicas from `starts` (inf: never) to `until`.

        Returns when each replica has no request left. Mutates what is there.
        """
        ahead = [at for at in range(step + 1, step + 1 + _AHEAD) if at <= self._last]
        if not ahead:
            return list(starts)
        lengths = np.concatenate([self._lengths.of(at) for at in ahead])
        for at in ahead:
            self._there.setdefault(at, np.zeros_like(self._lengths.of(at)))
            self._made.setdefault(at, np.full_like(self._there[at], step))
        have = self._compared(ahead, step)
        is_whole = (have.there == lengths).all(axis=1)
        prompts = len(lengths) // len(ahead)
        order = sorted(range(len(lengths)), key=lambda i: (i // prompts, is_whole[i]))
        earlier = have if have.there.any() else None
        tokens, ends = self._rollouts.pre_roll(lengths, order, table, starts, until, earlier)
        self._keep_longest(tokens)
        self.exchanged = _TOKEN_BYTES * int(tokens.sum())
        better = (tokens > have.there) | (tokens == lengths)
        for i, at in enumerate(ahead):
            mine = slice(i * prompts, (i + 1) * prompts)
            self._there[at] = np.where(better[mine], tokens[mine], self._there[at])
            self._made[at] = np.where(better[mine], step, self._made[at])
        return ends

    def _compared(self, steps: Sequence[int], now: int) -> PreRolled:
        """What there is of these steps, beside the policy of step `now`."""
        there = np.concatenate([self._there[at] for at in steps])
        updates = now - np.concatenate([self._made[at] for at in steps])
        rng = np.random.default_rng((self._seed, 3, now, steps[0]))
        return PreRolled(there, self._drift.matching(there, updates, rng))

    def _keep_longest(self, tokens: np.ndarray) -> None:
        """Drops all but the longest responses, as many as replicas may pass to each other. Mutates `tokens` [P, n]."""
        order = np.argsort(-tokens, axis=None, kind="stable")
        tokens.flat[order[np.cumsum(tokens.flat[order]) > self._most]] = 0
