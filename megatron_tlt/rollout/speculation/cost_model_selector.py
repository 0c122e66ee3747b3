"""Chooses the draft length with the most expected tokens per second, from costs and acceptance measured online.

    tokens(L)  = 1 + sum over k <= L of a_1 a_2 .. a_k               a_k: acceptance rate of draft position k
    seconds(L) = c_0 + c_B B + c_T T(L)                              a step of T rows, and, if L > 0,
                 + c_V  +  d_0 + d_P P + d_N B P                     verification, and drafting in P passes
    best       = argmax of B tokens(L) / seconds(L)                  L = 0: plain decoding
    verified   = drafted tokens with cumulative acceptance >= c_T B tokens(best) / seconds(best)
    next trial = now + lost seconds * (candidates - 1) / EXPLORATION

P is L for a drafter that drafts position by position, 1 for one that drafts a block. A candidate is a draft length.

Batch sizes from 2^(k-1) to 2^k - 1 form bucket k. Each bucket decodes with its best candidate, measures it in intervals
of steps, and decides anew after each. The costs c and d are fitted to the measurements of all buckets; a candidate's
own measurements correct the fit (`step_costs.py`).

A trial is an interval of another candidate. Its lost seconds are its own less those in which the best candidate
generates as many tokens. The more a candidate loses, the rarer its trials, so that all together lose `EXPLORATION` of
the time at most. Where a bucket has measured plain decoding only, or drafts only, the first trial of the other may
lose more: what it loses is predicted from other batch sizes, and that prediction can be far off. The right side of
`verified` is the number of tokens that the best candidate generates in the seconds of a row: where the seconds of a
step grow linearly with its rows, this choice brings most tokens a second (the greedy one of DSpark, Algorithm 1).

A new drafter (the first one, or new weights) that no bucket drafts with gets a trial of one drafted token, in the
first bucket where that loses 2 * `EXPLORATION` of the seconds since the last such trial at most, if nothing is
accepted. Its first measured draft, in a trial or not, reduces what was counted of the drafter before it to a prior,
and ends the intervals of other buckets.

Torch-free, no clock of its own. Legend: B running requests, T rows fed to the policy, L draft length, P passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_tlt.rollout.speculation.step_costs import (
    FULL_WEIGHT,
    AcceptanceCounts,
    Candidate,
    Costs,
    Expected,
    fit_steps,
    least_squares,
)
from megatron_tlt.types import NO_DRAFT, DraftedBy, DraftStrategy, StepMeasurement

EXPLORATION = 0.01  # share of the time that trials may lose
_HYSTERESIS = 0.03  # gain in tokens per second: an interval's median has an error of a few percent
_INTERVAL = 256  # request-steps of a full measurement interval: its median has an error of a few percent
_TRIAL = 12  # steps of a trial and of a bucket's first interval; the next ones double: a rollout's tail is short
_FIRST_LOSS = 0.1  # of a bucket's seconds, that its first trial with drafts, or without, may lose
_FIRST_TRIAL = 64  # request-steps of a new drafter's own trial, in four steps at least
_MOST_ACCEPTANCE = 0.95  # highest threshold of verification: without any draft acceptance would not be measured
_SLOWDOWN_SHARE = 0.5  # of a change of the best candidate's seconds that is ascribed to the machine, not to the step


@dataclass(slots=True)
class _Bucket:
    """Measurements and decisions for batch sizes 2^(key-1) to 2^key - 1. `best` and `current` index `candidates`."""

    key: int
    running: float  # mean of B
    candidates: list[Candidate]
    acceptance: AcceptanceCounts
    costs: Costs = field(default_factory=Costs)
    best: int = 0
    seconds: float = 0.0  # of all steps, at the machine's usual speed
    intervals: int = 0  # that have ended
    # The present interval:
    current: int = 0
    strategy: DraftStrategy = NO_DRAFT
    steps: int = _TRIAL  # until it ends
    is_cold: bool = True  # it follows an interval of another candidate
    measured: list[StepMeasurement] = field(default_factory=list)


class CostModelSelector:
    """A `StrategySelector` by measured seconds and acceptance."""

    def __init__(self, kind: DraftedBy, draft_len: int, passes: Callable[[int], int] = int):
        """For a drafter of `kind` that drafts `draft_len` tokens in a row at most, L tokens in `passes(L)` passes."""
        lengths = sorted({1 << i for i in range(draft_len.bit_length())} | {draft_len})
        self._kind, self._lengths = kind, [0, *lengths]  # of the candidates
        self._draft_len = draft_len
        self._passes = passes
        self._buckets: dict[int, _Bucket] = {}
        self._acceptance = self._no_counts()  # of all buckets
        self._is_new = True  # no draft by the present drafter was measured
        self._last_trial = 0.0  # seconds of all buckets before the last new drafter's first draft
        self._slowdown = 1.0  # seconds of a step now, over its seconds at the machine's usual speed

    def select(self, num_running: int) -> DraftStrategy:
        return self._bucket(num_running).strategy

    def usual(self, num_running: int) -> DraftStrategy:
        bucket = self._bucket(num_running)
        if bucket.current == bucket.best:
            return bucket.strategy
        return DraftStrategy(self._kind, self._lengths[bucket.best]) if bucket.best else NO_DRAFT

    def expected(self, num_running: int) -> Expected:
        bucket = self._bucket(num_running)
        best = bucket.candidates[bucket.best]
        if not best.length or not best.steps:
            return Expected()
        rates = bucket.acceptance.rates(self._acceptance.rates())
        tokens = 1.0 + float(np.cumprod(rates[: best.length]).sum())
        return Expected(tokens, best.rows / best.running, best.draft_seconds * self._slowdown)

    def record(self, measurement: StepMeasurement) -> None:
        bucket = self._bucket(measurement.num_running)
        strategy = measurement.strategy
        candidate = self._lengths.index(strategy.draft_len)
        if candidate != bucket.current:  # rank 0 of the tensor-parallel group selected it
            self._start_interval(bucket, candidate, strategy.min_cumulative_acceptance)
        if strategy.draft_len:
            self._forget_former_drafter(bucket)
            for counts in (bucket.acceptance, self._acceptance):
                counts.add(measurement.longest, measurement.num_running, measurement.accepted.tolist())
        bucket.measured.append(measurement)
        if len(bucket.measured) >= bucket.steps:
            self._end_interval(bucket)

    def drafter_changed(self) -> None:
        self._is_new = True

    def policy_changed(self) -> None:
        """Nothing: trials never end."""

    def _forget_former_drafter(self, here: _Bucket) -> None:
        """At a new drafter's first draft: what was counted of the one before it becomes a prior, the same for all.

        Intervals of other buckets than `here` end with their next step: they were chosen for the drafter before.
        """
        if self._is_new:
            self._is_new, self._last_trial = False, self._seconds()
            self._acceptance.fade()
            for bucket in self._buckets.values():
                bucket.acceptance = self._no_counts()
                if bucket is not here:
                    bucket.steps = min(bucket.steps, len(bucket.measured) + 1)

    def _seconds(self) -> float:
        return sum(bucket.seconds for bucket in self._buckets.values())

    # Measurement intervals

    def _bucket(self, num_running: int) -> _Bucket:
        """The bucket of a batch size. A new one starts with the best candidate by the other buckets' measurements."""
        key = num_running.bit_length()
        if key not in self._buckets:
            candidates = [Candidate(n, self._passes(n) if n else 0) for n in self._lengths]
            self._buckets[key] = _Bucket(key, num_running, candidates, self._no_counts())
            self._decide(self._buckets[key])
        return self._buckets[key]

    def _no_counts(self) -> AcceptanceCounts:
        return AcceptanceCounts([0.0] * self._draft_len, [0.0] * self._draft_len)

    def _start_interval(self, bucket: _Bucket, candidate: int, min_acceptance: float = 0.0) -> None:
        length = self._lengths[candidate]
        full = max(_TRIAL, int(_INTERVAL / bucket.running))
        doublings = min(bucket.intervals, _INTERVAL.bit_length())  # enough for any full interval
        bucket.strategy = DraftStrategy(self._kind, length, min_acceptance) if length else NO_DRAFT
        bucket.steps = min(_TRIAL << doublings, full) if candidate == bucket.best else _TRIAL
        bucket.is_cold = candidate != bucket.current
        bucket.current = candidate
        bucket.measured.clear()

    def _end_interval(self, bucket: _Bucket) -> None:
        """Adds the interval to its candidate and decides on the next one. Mutates the bucket and the slowdown."""
        candidate, steps = bucket.candidates[bucket.current], bucket.measured
        seconds = sum(m.step_seconds + m.draft_seconds for m in steps) / self._slowdown
        bucket.seconds += seconds
        bucket.intervals += 1
        bucket.running += 0.5 * (float(np.mean([m.num_running for m in steps])) - bucket.running)
        # After a switch caches are cold: the first half of the steps is slower than the candidate is in the long run.
        self._measure(bucket, candidate, steps[len(steps) // 2 :] if bucket.is_cold else steps)
        if bucket.current != bucket.best:
            lost = seconds - sum(m.num_emitted for m in steps) / self._speeds(bucket)[bucket.best]
            self._postpone(bucket, candidate, lost, seconds)
        self._decide(bucket)

    def _measure(self, bucket: _Bucket, candidate: Candidate, steps: Sequence[StepMeasurement]) -> None:
        """Adds the interval's medians. A part of the best candidate's deviation becomes the machine's slowdown."""
        running = np.array([m.num_running for m in steps], np.float64)
        rows = np.array([m.num_rows for m in steps], np.float64)
        measured = np.array([m.step_seconds for m in steps]) / self._slowdown
        drafting = float(np.median([m.draft_seconds for m in steps])) / self._slowdown
        costs = bucket.costs
        here = (float(running.mean()), float(rows.mean()))
        # Steps of an interval differ in B and T, so the median is taken of their seconds over the predicted ones.
        ratio = float(np.median(measured / costs.step_seconds(running, rows, candidate.length)))
        seconds = ratio * float(costs.step_seconds(*here, candidate.length))
        if candidate.steps and bucket.current == bucket.best:
            slowdown = ((seconds + drafting) / costs.seconds(candidate, *here)) ** _SLOWDOWN_SHARE
            self._slowdown *= slowdown
            seconds /= slowdown
            drafting /= slowdown
        candidate.add(len(steps), *here, seconds, drafting)

    def _postpone(self, bucket: _Bucket, candidate: Candidate, lost: float, seconds: float) -> None:
        """Sets when a candidate is tried next, whose trial of so many seconds lost `lost` of them.

        Each candidate has an equal part of the time that trials may lose. A trial counts `_HYSTERESIS` of its seconds
        at least, or equally good candidates would be tried all the time.
        """
        lost = max(lost, _HYSTERESIS * seconds)
        candidate.next_trial = bucket.seconds + lost * (len(self._lengths) - 1) / EXPLORATION

    def _decide(self, bucket: _Bucket) -> None:
        """Chooses the best candidate and that of the next interval. Mutates the bucket."""
        bucket.costs = self._fit()
        if self._try_new_drafter(bucket) or not self._has_measured_draft:
            return
        speeds = self._speeds(bucket)
        fastest = speeds.index(max(speeds))
        if speeds[fastest] > (1 + _HYSTERESIS) * speeds[bucket.best]:
            bucket.best = fastest
        best = speeds[bucket.best]
        seconds = [_TRIAL * bucket.running / speed for speed in speeds]  # of a trial
        lost = [(1 - speed / best) * trial for speed, trial in zip(speeds, seconds, strict=True)]
        for i, candidate in enumerate(bucket.candidates):
            if not candidate.next_trial:  # the loss of its first trial is predicted
                self._postpone(bucket, candidate, lost[i], seconds[i])
        due = [i for i, c in enumerate(bucket.candidates) if i != bucket.best and c.next_trial <= bucket.seconds]
        for kind in (range(1), range(1, len(speeds))):  # without and with drafts
            first = max(kind, key=speeds.__getitem__)
            if not any(bucket.candidates[i].steps for i in kind) and lost[first] <= _FIRST_LOSS * bucket.seconds:
                due.append(first)
        chosen = max(due, key=speeds.__getitem__, default=bucket.best)
        self._start_interval(bucket, chosen, min(best * bucket.costs.seconds_per_row, _MOST_ACCEPTANCE))

    def _try_new_drafter(self, bucket: _Bucket) -> bool:
        """Begins the trial of a new drafter, if it is due here. Mutates the bucket.

        Also of one whose first trial did not end, because the batch size left the bucket meanwhile: nothing is known of
        drafts then, and without a trial nothing ever would be.
        """
        plain, trial, running = *bucket.candidates[:2], bucket.running
        is_known = self._has_measured_draft
        if (is_known and not self._is_new) or not plain.steps or any(other.best for other in self._buckets.values()):
            return False
        steps = min(_TRIAL, max(4, round(_FIRST_TRIAL / running)))
        if is_known:  # else its costs are not
            drafting = bucket.costs.seconds(trial, running, running * (1 + trial.length))
            most_lost = steps * (drafting - bucket.costs.seconds(plain, running, running))
            if most_lost > 2 * EXPLORATION * (self._seconds() - self._last_trial):
                return False
        self._start_interval(bucket, 1)
        bucket.steps = steps
        return True

    # Predictions

    @property
    def _has_measured_draft(self) -> bool:
        """Whether an interval with drafts has ended, in any bucket."""
        return any(c.length and c.steps for bucket in self._buckets.values() for c in bucket.candidates)

    def _measured_candidates(self, bucket: _Bucket) -> list[tuple[int, Candidate]]:
        """Every measured candidate with the distance of its bucket, the nearest first."""
        near = sorted(self._buckets.values(), key=lambda other: abs(other.key - bucket.key))
        return [(abs(b.key - bucket.key), c) for b in near for c in b.candidates if c.steps]

    def _speeds(self, bucket: _Bucket) -> list[float]:
        """Expected tokens per second of every candidate, at the machine's usual speed."""
        running = bucket.running
        measured = self._measured_candidates(bucket)
        speeds = []
        nearest = {c.length: c for _, c in reversed(measured)}
        distance = min((d for d, c in measured if c.length), default=0)
        drafted = [c for d, c in measured if c.length and d == distance]
        expected = np.cumsum(np.cumprod(bucket.acceptance.rates(self._acceptance.rates())))
        for candidate in bucket.candidates:
            length = candidate.length
            tokens = 1.0 + float(expected[length - 1]) if length else 1.0
            rows = running * (1.0 + length * candidate.verified_share(drafted))
            measured_as = nearest.get(length, candidate)
            speeds.append(running * tokens / bucket.costs.seconds(measured_as, running, rows))
        return speeds

    def _fit(self) -> Costs:
        """The costs that explain the measurements of all buckets best."""
        measured = [c for bucket in self._buckets.values() for c in bucket.candidates if c.steps]
        drafts = [
            ((1.0, c.passes, c.running * c.passes), c.draft_seconds, min(c.steps, FULL_WEIGHT))
            for c in measured
            if c.length
        ]
        return Costs(fit_steps(measured), least_squares(drafts, 3))
