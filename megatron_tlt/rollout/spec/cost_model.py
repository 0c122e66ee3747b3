"""Chooses the draft length with the most expected tokens per second, from step costs and acceptance measured online.

    tokens(L)  = 1 + sum over k <= L of a_1 a_2 .. a_k               a_k: acceptance rate of draft position k
    seconds(L) = c_0 + c_B B + c_T T(L)                              a step of T rows, and, if L > 0,
                 + c_V  +  d_0 + d_L L + d_N B L                     verification and drafting
    length     = argmax over L of B tokens(L) / seconds(L)           L = 0: plain decoding

Batch sizes that have the same power of two below them form a regime. Each regime measures the lengths that it uses,
fits the costs to the measurements of all regimes, near ones first, and corrects the fit where it has measurements of
its own. A drafted token is verified only if its cumulative acceptance is worth the seconds of one more row.

A regime uses its best length. Other lengths are tried for a few steps now and then: what the last trial of a length
lost decides when it is tried next, so that all trials lose `exploration` of the time at most. A length that loses much
is tried rarely, and one that is nearly as good as the best often. Measurements of a span of steps enter as medians.

Torch-free, no clock of its own. Legend: B running requests, T rows fed to the policy, L draft length, C cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from megatron_tlt.rollout.spec.step_costs import Acceptance, Cell, Costs, least_squares
from megatron_tlt.types import NO_DRAFT, DraftStrategy, StepMeasurement

_SPAN = 256  # request-steps between two decisions of a regime; fewer at first
_TRIAL = 12  # steps of a trial; the first half of them, with cold caches, is not measured
_DISTANCE = 0.25  # weight of a measurement in the fit of the next regime; squared in the one after
_HIGHEST_PRICE = 0.95  # tokens that a row is said to cost at most: without any draft nothing would be learned
_DRIFT = 0.5  # share of a deviation of the best length's seconds that the machine's present speed explains
_VERSION = 1  # of the state
_SAVED = ("key", "running", "best", "seconds", "spans")  # of a regime, beside cells and acceptance


@dataclass(slots=True)
class _Regime:
    """What is known and decided for batch sizes 2^(key-1) to 2^key - 1."""

    key: int
    running: float  # mean of B
    cells: dict[int, Cell]
    acceptance: Acceptance
    strategies: dict[int, DraftStrategy]
    costs: Costs = field(default_factory=Costs)
    best: int = 0  # draft length
    playing: int = 0  # of the present span
    seconds: float = 0.0  # of all its steps, at the machine's usual speed
    spans: int = 0
    span: int = _TRIAL  # steps of the present span
    is_changed: bool = True  # the present span follows one of another draft length
    measured: list[tuple[float, ...]] = field(default_factory=list)  # steps of the present span


class CostModelSelector:
    """See `StrategySelector`."""

    def __init__(
        self, kind: str, draft_len: int, topk: int = 1, hysteresis: float = 0.03, exploration: float = 0.01
    ):
        """For a drafter of `kind` that drafts `draft_len` tokens in a row at most, with `topk` candidates each.

        `hysteresis`: gain in tokens per second from which on another length replaces the best one. `exploration`:
        share of the time that trials of other lengths may lose.
        """
        powers = {1 << i for i in range(draft_len.bit_length())}
        self._lengths = (0, *sorted(powers | {draft_len}))
        self._kind, self._topk = kind, topk
        self._hysteresis, self._exploration = hysteresis, exploration
        self._regimes: dict[int, _Regime] = {}
        self._acceptance = self._no_counts()  # of all regimes
        self._drift = 1.0  # seconds now, over seconds at the machine's usual speed

    def select(self, num_running: int) -> DraftStrategy:
        """See `StrategySelector.select`."""
        regime = self._regimes.get(num_running.bit_length()) or self._open(num_running)
        return regime.strategies[regime.playing]

    def record(self, measurement: StepMeasurement) -> None:
        """See `StrategySelector.record`."""
        m = measurement
        regime = self._regimes.get(m.num_running.bit_length()) or self._open(m.num_running)
        length = m.strategy.draft_len
        if length != regime.playing:  # rank 0 of the tensor-parallel group selected it
            self._play(regime, length)
        if length:
            accepted = m.accepted.tolist()
            regime.acceptance.add(length, m.num_running, accepted)
            self._acceptance.add(length, m.num_running, accepted)
        measured = regime.measured
        measured.append((m.num_running, m.num_rows, m.step_seconds, m.draft_seconds, m.num_emitted))
        if len(measured) >= regime.span:
            self._close(regime)

    @property
    def _has_drafted(self) -> bool:
        return self._acceptance.tried[0] > 0

    # Spans of steps

    def _open(self, num_running: int) -> _Regime:
        """A regime at its first step: what other regimes have measured decides how it starts."""
        regime = self._new_regime(num_running)
        self._regimes[regime.key] = regime
        if self._has_drafted:
            self._decide(regime)
        return regime

    def _new_regime(self, running: float) -> _Regime:
        return _Regime(
            int(running).bit_length(),
            running,
            {length: Cell(length) for length in self._lengths},
            self._no_counts(),
            {n: DraftStrategy(self._kind, n, self._topk) if n else NO_DRAFT for n in self._lengths},
        )

    def _no_counts(self) -> Acceptance:
        return Acceptance([0.0] * self._lengths[-1], [0.0] * self._lengths[-1])

    def _play(self, regime: _Regime, length: int) -> None:
        regime.is_changed = length != regime.playing
        regime.playing = length
        regime.measured.clear()
        usual = max(_TRIAL, int(_SPAN / regime.running))
        regime.span = _TRIAL if length != regime.best else min(_TRIAL << regime.spans, usual)

    def _close(self, regime: _Regime) -> None:
        """Learns from a span and begins the next one. Mutates the regime and the drift."""
        length, steps = regime.playing, np.array(regime.measured)
        cell, is_trial = regime.cells[length], length != regime.best
        seconds = float(steps[:, 2:4].sum()) / self._drift
        regime.seconds += seconds
        regime.spans += 1
        regime.running += 0.5 * (float(steps[:, 0].mean()) - regime.running)
        self._measure(regime, cell, steps[len(steps) // 2 :] if regime.is_changed else steps)
        if is_trial:
            best = self._speeds(regime)[regime.best]
            lost = seconds - float(steps[:, 4].sum()) / best
            self._postpone(regime, cell, max(lost, self._hysteresis * seconds))
        if not self._has_drafted:
            self._play(regime, self._lengths[min(2, len(self._lengths) - 1)])
        else:
            self._decide(regime)

    def _measure(self, regime: _Regime, cell: Cell, steps: np.ndarray) -> None:
        """Adds a span to its cell. Of the best length's deviation the machine's speed takes a part."""
        running, rows, step_seconds, draft_seconds = steps[:, :4].T
        costs = regime.costs
        here = float(running.mean()), float(rows.mean())
        ratio = float(np.median(step_seconds / costs.step_seconds(running, rows, cell.length))) / self._drift
        seconds, drafting = (
            ratio * float(costs.step_seconds(*here, cell.length)),
            float(np.median(draft_seconds)) / self._drift,
        )
        if cell.steps and cell.length == regime.best:
            part = ((seconds + drafting) / costs.seconds(cell, *here)) ** _DRIFT
            self._drift *= part
            seconds, drafting = seconds / part, drafting / part
        cell.add(len(steps), *here, seconds, drafting)

    def _postpone(self, regime: _Regime, cell: Cell, lost: float) -> None:
        """Sets when a length is due that loses so many seconds in a trial: each has an equal part of the budget."""
        cell.due = regime.seconds + lost * (len(self._lengths) - 1) / self._exploration

    def _decide(self, regime: _Regime) -> None:
        """Chooses the best length and what the next span plays. Mutates the regime."""
        regime.costs = self._fit(regime)
        speeds = self._speeds(regime)
        fastest = max(speeds, key=speeds.__getitem__)
        if speeds[fastest] > (1 + self._hysteresis) * speeds[regime.best]:
            regime.best = fastest
        best = speeds[regime.best]
        for length, cell in regime.cells.items():
            if not cell.due:  # the loss of its first trial is predicted
                lost = max(1 - speeds[length] / best, self._hysteresis)
                self._postpone(regime, cell, lost * _TRIAL * regime.running / speeds[length])
        due = [n for n, cell in regime.cells.items() if n != regime.best and cell.due <= regime.seconds]
        price = min(best * regime.costs.step[2], _HIGHEST_PRICE)
        for length in self._lengths[1:]:
            strategy = regime.strategies[length]
            regime.strategies[length] = replace(strategy, min_cumulative_acceptance=price)
        self._play(regime, max(due, key=speeds.__getitem__, default=regime.best))

    # Predictions

    def _speeds(self, regime: _Regime) -> dict[int, float]:
        """Expected tokens per second of every draft length, at the machine's usual speed."""
        running = regime.running
        rates = regime.acceptance.rates(self._acceptance.rates())
        tokens = [1.0, *(1.0 + np.cumsum(np.cumprod(rates))).tolist()]
        speeds = {}
        for length in self._lengths:
            rows = running * (1.0 + length * self._verified_share(regime, length))
            nearest = min(
                self._regimes.values(), key=lambda r: (not r.cells[length].steps, abs(r.key - regime.key))
            )
            speeds[length] = (
                running * tokens[length] / regime.costs.seconds(nearest.cells[length], running, rows)
            )
        return speeds

    def _verified_share(self, regime: _Regime, length: int) -> float:
        """Drafted nodes that are verified, of `length` a request: as the nearest measurement has it."""
        nearest, share = (len(self._regimes) + 64, 0), 1.0
        for other in self._regimes.values():
            for cell in other.cells.values():
                distance = abs(other.key - regime.key), abs(cell.length - length)
                if cell.steps and cell.length and distance < nearest:
                    nearest, share = distance, (cell.rows / cell.running - 1) / cell.length
        return share

    def _fit(self, regime: _Regime) -> Costs:
        """Costs near a regime: measurements of the others weigh less the further away they are."""
        pairs = [
            (cell, min(cell.steps, _TRIAL) * _DISTANCE ** abs(other.key - regime.key))
            for other in self._regimes.values()
            for cell in other.cells.values()
            if cell.steps
        ]
        step = [
            ((1.0, cell.running, cell.rows, float(cell.length > 0)), cell.step_seconds, weight)
            for cell, weight in pairs
        ]
        draft = [
            ((1.0, cell.length, cell.running * cell.length), cell.draft_seconds, weight)
            for cell, weight in pairs
            if cell.length
        ]
        return Costs(least_squares(step, 4), least_squares(draft, 3))

    # State

    def state_dict(self) -> dict[str, Any]:
        """Measurements and decisions of every regime."""
        return {
            "selector": "cost_model",
            "version": _VERSION,
            "drafts": [self._kind, self._topk, list(self._lengths)],
            "drift": self._drift,
            "acceptance": asdict(self._acceptance),
            "regimes": [
                {name: getattr(regime, name) for name in _SAVED}
                | {"cells": [asdict(cell) for cell in regime.cells.values()]}
                | {"acceptance": asdict(regime.acceptance)}
                for regime in self._regimes.values()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; ignores the state of another selector, version, drafter or draft length."""
        own = self.state_dict()
        if any(state.get(name) != own[name] for name in ("selector", "version", "drafts")):
            return
        self._drift, self._regimes = float(state["drift"]), {}
        self._acceptance = Acceptance(**state["acceptance"])
        for saved in state["regimes"]:
            regime = self._new_regime(saved["running"])
            for name in _SAVED:
                setattr(regime, name, saved[name])
            regime.cells = {cell["length"]: Cell(**cell) for cell in saved["cells"]}
            regime.acceptance = Acceptance(**saved["acceptance"])
            self._regimes[regime.key] = regime
        for regime in self._regimes.values():
            if self._has_drafted:
                self._decide(regime)
