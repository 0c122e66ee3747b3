"""Chooses drafter and draft length with the most expected tokens per second, from costs and acceptance measured online.

    tokens(L)  = 1 + sum over k <= L of a_1 a_2 .. a_k               a_k: acceptance rate of draft position k
    seconds(L) = c_0 + c_B B + c_T T(L)                              a step of T rows, and, if L > 0,
                 + c_V  +  d_0 + d_P P + d_N B P                     verification, and drafting in P passes
    candidate  = argmax of B tokens(L) / seconds(L)                  L = 0: plain decoding

P is L for a drafter that drafts position by position, 1 for one that drafts a block. A candidate is what drafts and a
draft length: lengths of the configured drafter, and of a mixed drafter also those of its trained part alone. Acceptance
is counted by what drafts. Batch sizes that have the same power of two below them form a regime. Each regime measures
the candidates that it uses, fits the costs to the measurements of all regimes, near ones first, and corrects the fit
where it has measurements of its own. A drafted token is verified only if its cumulative acceptance is worth the seconds
of one more row.

A regime uses its best candidate. The others are tried for a few steps now and then: what the last trial of a candidate
lost decides when it is tried next, so that all trials lose `exploration` of the time at most. Candidates that lose much
are tried rarely, those that are nearly as good as the best often. Measurements of a span of steps enter as medians.

Torch-free, no clock of its own. Legend: B running requests, T rows fed to the policy, L draft length, C cells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from megatron_tlt.rollout.spec.step_costs import Acceptance, Cell, Costs, least_squares
from megatron_tlt.types import NO_DRAFT, DraftedBy, DraftStrategy, StepMeasurement

_SPAN = 256  # request-steps between two decisions of a regime; fewer at first
_TRIAL = 12  # steps of a trial; the first half of them, with cold caches, is not measured
_DISTANCE = 0.25  # weight of a measurement in the fit of the next regime; squared in the one after
_HIGHEST_PRICE = 0.95  # tokens that a row costs at most: without any draft nothing would be measured
_DRIFT = 0.5  # share of a deviation of the best candidate's seconds that the machine's present speed explains


@dataclass(slots=True)
class _Regime:
    """Measurements and decisions for batch sizes 2^(key-1) to 2^key - 1. Candidates are indices of `cells`."""

    key: int
    running: float  # mean of B
    cells: list[Cell]
    acceptance: dict[str, Acceptance]  # by kind
    costs: Costs = field(default_factory=Costs)
    best: int = 0
    price: float = 0.0  # tokens that a row must be expected to bring
    seconds: float = 0.0  # of all steps, at the machine's usual speed
    spans: int = 0
    # The present span:
    playing: int = 0
    strategy: DraftStrategy = NO_DRAFT
    span: int = _TRIAL  # its steps
    is_changed: bool = True  # it follows one of another candidate
    measured: list[tuple[float, ...]] = field(default_factory=list)


class CostModelSelector:
    """See `StrategySelector`."""

    def __init__(
        self,
        kind: DraftedBy,
        draft_len: int,
        hysteresis: float = 0.03,
        exploration: float = 0.01,
        passes: Callable[[int], int] = int,
    ):
        """For a drafter of `kind` that drafts `draft_len` tokens in a row at most.

        `hysteresis`: gain in tokens per second from which on another candidate replaces the best one. `exploration`:
        share of the time that trials may lose. `passes`: forward passes of a draft by its length.
        """
        lengths = sorted({1 << i for i in range(draft_len.bit_length())} | {draft_len})
        self._candidates = [(NO_DRAFT.kind, 0), *((kind, n) for n in lengths)]
        if kind == "mixed":
            self._candidates += [("trained", n) for n in lengths if n > 1]
        self._draft_len = draft_len
        self._hysteresis, self._exploration, self._passes = hysteresis, exploration, passes
        self._regimes: dict[int, _Regime] = {}
        self._acceptance = self._no_counts()  # of all regimes
        self._drift = 1.0  # seconds now, over seconds at the machine's usual speed

    def select(self, num_running: int) -> DraftStrategy:
        """See `StrategySelector.select`."""
        regime = self._regimes.get(num_running.bit_length()) or self._open(num_running)
        return regime.strategy

    def record(self, measurement: StepMeasurement) -> None:
        """See `StrategySelector.record`."""
        m = measurement
        regime = self._regimes.get(m.num_running.bit_length()) or self._open(m.num_running)
        kind, length = m.strategy.kind, m.strategy.draft_len
        if (kind, length) != self._candidates[
            regime.playing
        ]:  # rank 0 of the tensor-parallel group selected it
            self._play(regime, self._candidates.index((kind, length)))
        if length:
            accepted = m.accepted.tolist()
            regime.acceptance[kind].add(length, m.num_running, accepted)
            self._acceptance[kind].add(length, m.num_running, accepted)
        measured = regime.measured
        measured.append((m.num_running, m.num_rows, m.step_seconds, m.draft_seconds, m.num_emitted))
        if len(measured) >= regime.span:
            self._close(regime)

    # Spans of steps

    def _open(self, num_running: int) -> _Regime:
        """A regime at its first step: what other regimes have measured decides how it starts."""
        cells = [Cell(kind, n, self._passes(n) if n else 0) for kind, n in self._candidates]
        regime = _Regime(num_running.bit_length(), num_running, cells, self._no_counts())
        self._regimes[regime.key] = regime
        self._decide(regime)
        return regime

    def _no_counts(self) -> dict[str, Acceptance]:
        zeros = [0.0] * self._draft_len
        return {kind: Acceptance(zeros[:], zeros[:]) for kind, length in self._candidates if length}

    def _play(self, regime: _Regime, candidate: int) -> None:
        kind, length = self._candidates[candidate]
        price, usual = regime.price, max(_TRIAL, int(_SPAN / regime.running))
        regime.strategy = DraftStrategy(kind, length, price) if length else NO_DRAFT
        regime.span = min(_TRIAL << regime.spans, usual) if candidate == regime.best else _TRIAL
        regime.is_changed = candidate != regime.playing
        regime.playing = candidate
        regime.measured.clear()

    def _close(self, regime: _Regime) -> None:
        """Measures a span and begins the next one. Mutates the regime and the drift."""
        steps, cell = np.array(regime.measured), regime.cells[regime.playing]
        seconds = float(steps[:, 2:4].sum()) / self._drift
        regime.seconds += seconds
        regime.spans += 1
        regime.running += 0.5 * (float(steps[:, 0].mean()) - regime.running)
        self._measure(regime, cell, steps[len(steps) // 2 :] if regime.is_changed else steps)
        if regime.playing != regime.best:
            best = self._speeds(regime)[regime.best]
            lost = seconds - float(steps[:, 4].sum()) / best
            self._postpone(regime, cell, max(lost, self._hysteresis * seconds))
        self._decide(regime)

    def _measure(self, regime: _Regime, cell: Cell, steps: np.ndarray) -> None:
        """Adds a span to its cell. Of the best candidate's deviation the machine's speed takes a part."""
        running, rows, step_seconds, draft_seconds = steps[:, :4].T
        costs = regime.costs
        here = float(running.mean()), float(rows.mean())
        ratio = float(np.median(step_seconds / costs.step_seconds(running, rows, cell.length))) / self._drift
        seconds = ratio * float(costs.step_seconds(*here, cell.length))
        drafting = float(np.median(draft_seconds)) / self._drift
        if cell.steps and regime.playing == regime.best:
            part = ((seconds + drafting) / costs.seconds(cell, *here)) ** _DRIFT
            self._drift *= part
            seconds, drafting = seconds / part, drafting / part
        cell.add(len(steps), *here, seconds, drafting)

    def _postpone(self, regime: _Regime, cell: Cell, lost: float) -> None:
        """Sets when a candidate is due that loses so many seconds in a trial: each has an equal part of the budget."""
        cell.due = regime.seconds + lost * (len(self._candidates) - 1) / self._exploration

    def _decide(self, regime: _Regime) -> None:
        """Chooses the best candidate and what the next span plays. Mutates the regime."""
        if not any(counts.tried[0] for counts in self._acceptance.values()):
            if regime.cells[0].steps:  # plain decoding was measured; a short draft is next
                self._play(regime, min(2, len(self._candidates) - 1))
            return
        regime.costs = self._fit(regime)
        speeds = self._speeds(regime)
        fastest = speeds.index(max(speeds))
        if speeds[fastest] > (1 + self._hysteresis) * speeds[regime.best]:
            regime.best = fastest
        best = speeds[regime.best]
        for cell, speed in zip(regime.cells, speeds, strict=True):
            if not cell.due:  # the loss of its first trial is predicted
                lost = max(1 - speed / best, self._hysteresis)
                self._postpone(regime, cell, lost * _TRIAL * regime.running / speed)
        due = [i for i, cell in enumerate(regime.cells) if i != regime.best and cell.due <= regime.seconds]
        regime.price = min(best * regime.costs.step[2], _HIGHEST_PRICE)
        self._play(regime, max(due, key=speeds.__getitem__, default=regime.best))

    # Predictions

    def _measured_cells(self, regime: _Regime) -> list[tuple[int, Cell]]:
        """Every measured cell with the distance of its regime, the nearest first."""
        near = sorted(self._regimes.values(), key=lambda other: abs(other.key - regime.key))
        return [(abs(r.key - regime.key), cell) for r in near for cell in r.cells if cell.steps]

    def _speeds(self, regime: _Regime) -> list[float]:
        """Expected tokens per second of every candidate, at the machine's usual speed."""
        running, measured, speeds = regime.running, self._measured_cells(regime), []
        nearest = {(cell.kind, cell.length): cell for _, cell in reversed(measured)}
        distance = min((d for d, cell in measured if cell.length), default=0)
        drafted = [cell for d, cell in measured if cell.length and d == distance]
        expected = {
            kind: np.cumsum(np.cumprod(counts.rates(self._acceptance[kind].rates())))
            for kind, counts in regime.acceptance.items()
        }
        for cell in regime.cells:
            tokens = 1.0 + float(expected[cell.kind][cell.length - 1]) if cell.length else 1.0
            rows = running * (1.0 + cell.length * cell.verified_share(drafted))
            seconds = regime.costs.seconds(nearest.get((cell.kind, cell.length), cell), running, rows)
            speeds.append(running * tokens / seconds)
        return speeds

    def _fit(self, regime: _Regime) -> Costs:
        """Costs near a regime: measurements of the others weigh less the further away they are."""
        step, draft = [], []
        for distance, cell in self._measured_cells(regime):
            weight = min(cell.steps, _TRIAL) * _DISTANCE**distance
            verifies = float(cell.length > 0)
            step.append(((1.0, cell.running, cell.rows, verifies), cell.step_seconds, weight))
            if cell.length:
                draft.append(((1.0, cell.passes, cell.running * cell.passes), cell.draft_seconds, weight))
        return Costs(least_squares(step, 4), least_squares(draft, 3))

    # State

    def state_dict(self) -> dict[str, Any]:
        """Measurements and decisions; of the present spans those of no step."""
        return {
            "selector": "cost_model",
            "candidates": [list(candidate) for candidate in self._candidates],
            "drift": self._drift,
            "acceptance": {kind: asdict(counts) for kind, counts in self._acceptance.items()},
            "regimes": [asdict(regime) | {"measured": []} for regime in self._regimes.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; ignores the state of another selector, drafter or draft length."""
        own = self.state_dict()
        if any(state.get(name) != own[name] for name in ("selector", "candidates")):
            return
        self._drift = float(state["drift"])
        self._acceptance = _acceptance(state)
        for saved in state["regimes"]:
            regime = self._regimes[saved["key"]] = _Regime(**saved)
            regime.cells = [Cell(**cell) for cell in saved["cells"]]
            regime.acceptance, regime.costs = _acceptance(saved), Costs(**saved["costs"])
            regime.strategy, regime.measured = DraftStrategy(**saved["strategy"]), []


def _acceptance(state: Mapping[str, Any]) -> dict[str, Acceptance]:
    return {kind: Acceptance(**counts) for kind, counts in state["acceptance"].items()}
