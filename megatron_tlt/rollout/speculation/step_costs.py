"""Costs of decoding steps and acceptance of drafts, measured online: for `cost_model_selector` and `pre_rollouts`.

Torch-free, no clock of its own. Legend: B running requests, T rows fed to the policy, L draft length, P passes of the
drafter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

_MEAN_STEPS = 128  # steps that a candidate's means fade over: some ten trials
_COUNT_STEPS = 2048  # request-steps that acceptance counts fade over: the policy changes between rollouts
_PRIOR_STEPS = 16.0  # request-steps that a rate's prior weighs: enough to keep a first draft's chance out
_PRIOR_RATE = 0.7  # acceptance rate of the first position before anything was measured
LEAST_SECONDS = 1e-6  # of a measured step: the clock of a thread may be coarse, and not have moved
FULL_WEIGHT = 12.0  # steps from which on a candidate's means weigh as much as any in a fit
_MOST_UNFITTED = 32  # steps between two fits
_RIDGE = 0.01  # weight of a fit's prior (all terms have equal shares of the seconds): below that of any measurement


@dataclass(slots=True)
class Candidate:
    """A draft length in one bucket, and fading means of its steps; seconds at the machine's usual speed."""

    length: int
    passes: int  # of the drafter, to draft `length` tokens
    steps: float = 0.0  # 0: never measured
    running: float = 0.0
    rows: float = 0.0
    step_seconds: float = 0.0
    draft_seconds: float = 0.0
    next_trial: float = 0.0  # seconds of the bucket from which on it may be tried; 0: not known yet

    def add(self, steps: int, running: float, rows: float, step_seconds: float, draft_seconds: float) -> None:
        """Adds the means of `steps` steps. Mutates the means."""
        self.steps = min(self.steps + steps, _MEAN_STEPS)
        share = min(1.0, steps / self.steps)
        self.running += share * (running - self.running)
        self.rows += share * (rows - self.rows)
        self.step_seconds += share * (step_seconds - self.step_seconds)
        self.draft_seconds += share * (draft_seconds - self.draft_seconds)

    def verified_share(self, drafted: Sequence[Candidate]) -> float:
        """Share of the drafted tokens that are verified, as in the most similar of `drafted`, which were measured.

        1 if there is none.
        """
        if not drafted or not self.length:
            return 1.0
        similar = min(drafted, key=lambda c: abs(c.length - self.length))
        return (similar.rows / similar.running - 1) / similar.length


class Expected(NamedTuple):
    """What a step of a strategy brings and costs; the defaults are those of plain decoding."""

    tokens: float = 1.0  # of a request
    rows: float = 1.0  # of a request
    draft_seconds: float = 0.0  # of all requests


@dataclass(slots=True)
class Costs:
    """Seconds of a step, c_0 + c_B B + c_T T (+ c_V, verifying), and of P drafting passes, d_0 + d_P P + d_N B P."""

    step: list[float] = field(default_factory=lambda: [1.0, 0.0, 0.0, 0.0])
    draft: list[float] = field(default_factory=lambda: [1.0, 0.0, 0.0])

    @property
    def seconds_per_row(self) -> float:
        """c_T, of one more row in a step."""
        return self.step[2]

    def step_seconds(self, running: Any, rows: Any, length: Any) -> Any:
        """Of a step of B = `running` requests and T = `rows` rows. `length`: of the drafts that it verifies, or 0."""
        base, per_request, per_row, verifying = self.step
        return base + per_request * running + per_row * rows + verifying * (length > 0)

    def draft_seconds(self, running: float, passes: int) -> float:
        """Of drafting for B = `running` requests in P = `passes` passes; 0 without a pass."""
        return self.draft[0] + self.draft[1] * passes + self.draft[2] * running * passes if passes else 0.0

    def seconds(self, candidate: Candidate, running: float, rows: float) -> float:
        """Of step and drafting: the fit, times the ratio of the candidate's own measurement to the fit at its place."""
        c = candidate
        step = float(self.step_seconds(running, rows, c.length))
        draft = self.draft_seconds(running, c.passes)
        if c.steps:
            step *= c.step_seconds / self.step_seconds(c.running, c.rows, c.length)
        if c.steps and c.length:
            draft *= c.draft_seconds / self.draft_seconds(c.running, c.passes)
        return step + draft


class RowCosts:
    """Seconds of decoding steps by their requests and rows, from every step that was recorded.

    Steps are gathered in cells, plain and verifying ones apart, of B and of T from 2^(k-1) to 2^k - 1; the costs are
    fitted to the cells' means.
    """

    def __init__(self) -> None:
        self.costs = Costs()
        self._cells: dict[tuple[int, int, int], Candidate] = {}
        self._records, self._next_fit = 0, 1

    @property
    def most_rows(self) -> int:
        """Rows of the largest steps that were recorded; at least 1."""
        return max((round(cell.rows) for cell in self._cells.values()), default=1)

    def record(self, running: int, rows: int, seconds: float) -> None:
        """Adds a step, without its drafting. Mutates the means, and at times the costs."""
        verifies = int(rows > running)
        key = (running.bit_length(), rows.bit_length(), verifies)
        if key not in self._cells:
            self._cells[key] = Candidate(verifies, 0)
        self._cells[key].add(1, running, rows, seconds, 0.0)
        self._records += 1
        if self._records >= self._next_fit:
            self._next_fit = self._records + min(self._records, _MOST_UNFITTED)
            self._fit()

    def seconds(self, running: int, drafted: np.ndarray) -> np.ndarray:
        """Of a step of B = `running` requests that verifies so many drafted tokens, float64 [n]; 0: plain."""
        seconds: np.ndarray = self.costs.step_seconds(running, running + drafted, drafted)
        return seconds

    def _fit(self) -> None:
        cells = list(self._cells.values())
        has_verified = any(cell.length for cell in cells)  # before the first such step, verification costs nothing
        self.costs = Costs(fit_steps(cells) if has_verified else [*fit_steps(cells, terms=3), 0.0])


@dataclass(slots=True)
class AcceptanceCounts:
    """Fading counts by draft position: request-steps that emitted all tokens before it, and those that emitted it."""

    tried: list[float]
    accepted: list[float]

    def add(self, longest: int, num_running: int, accepted: list[int]) -> None:
        """Counts one step in which each row might draft `longest` tokens. Mutates the counts."""
        keep = max(0.5, 1.0 - num_running / _COUNT_STEPS)
        before = num_running
        for at in range(longest):
            now = accepted[at] if accepted else 0  # nothing drafted: none was accepted
            self.tried[at] = self.tried[at] * keep + before
            self.accepted[at] = self.accepted[at] * keep + now
            before = now

    def fade(self) -> None:
        """All counts weigh no more than a prior from now on. Mutates the counts."""
        keep = min(1.0, _PRIOR_STEPS / max(self.tried[0], 1.0))
        self.tried = [keep * count for count in self.tried]
        self.accepted = [keep * count for count in self.accepted]

    def rates(self, prior: list[float] | None = None) -> list[float]:
        """Acceptance rate of each position; where little was counted `prior`, or the rate of the position before."""
        rates, rate = [], _PRIOR_RATE
        for at, (accepted, tried) in enumerate(zip(self.accepted, self.tried, strict=True)):
            rate = prior[at] if prior is not None else rate
            rate = (accepted + _PRIOR_STEPS * rate) / (tried + _PRIOR_STEPS)
            rates.append(rate)
        return rates


def fit_steps(measured: Iterable[Candidate], terms: int = 4) -> list[float]:
    """The first `terms` of c_0, c_B, c_T and c_V, which explain the step seconds of `measured` best."""
    return least_squares(
        [
            ((1.0, c.running, c.rows, float(c.length > 0))[:terms], c.step_seconds, min(c.steps, FULL_WEIGHT))
            for c in measured
        ],
        terms,
    )


def least_squares(measured: Sequence[tuple[tuple[float, ...], float, float]], size: int) -> list[float]:
    """Non-negative factors of the `size` terms of each measurement (terms, seconds, weight) that give its seconds.

    Weighted least squares of relative errors. Where the measurements are not enough, a weak prior decides, by which
    all terms have equal shares of the seconds.
    """
    if not measured:
        return [1.0] + [0.0] * (size - 1)
    x, y, w = (np.array(column) for column in zip(*measured, strict=True))
    w /= w.sum()
    y = np.maximum(y, 1e-9)  # seconds: a clock may not have moved
    scale = np.maximum(w @ (x / y[:, None]), 1e-9)  # per second: about one over the factor of a term alone
    x = x / y[:, None] / scale
    normal = (x * w[:, None]).T @ x + _RIDGE * np.eye(size)
    target = w @ x + _RIDGE / size
    kept = list(range(size))
    while True:
        solved = np.linalg.solve(normal[np.ix_(kept, kept)], target[kept])
        if solved.min() >= 0:
            break
        del kept[int(solved.argmin())]
    factors = np.zeros(size)
    factors[kept] = solved
    found: list[float] = (factors / scale).tolist()
    return found
