"""What a step costs: seconds of a forward by requests and rows, learned from the steps themselves.

A policy forward of B requests and T rows (T - B of them drafted) is flat up to the ridge on a GPU and rises in steps on
a CPU. Times come from a machine that others may share, so a single one is worth little. Three layers:

    seconds(B, T) = drift * (c0 + cB * B + cT * T) * correction(B, T)

The linear model is fitted to robust cell estimates and speaks where nothing was measured. Corrections are smoothed
ratios to it where something was. Drift is what moves all cells together: growing contexts, a busy neighbour.

Numpy only, no clock: seconds come in as arguments. Legend: B requests, T rows, C cells of the grid on each axis.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np


def _axis(exact: int, limit: int) -> tuple[np.ndarray, list[int]]:
    """Knots 1, 2, .. `exact`, then `exact / 2` an octave up to `limit`; and the nearest knot of 0 .. limit."""
    knots = list(range(1, exact + 1))
    while knots[-1] < limit:
        knots += [knots[-1] + (1 + i) * (knots[-1] * 2 // exact) for i in range(exact // 2)]
    axis = np.array(knots, np.float64)
    return axis, np.searchsorted((axis[1:] + axis[:-1]) / 2, np.arange(limit + 1)).tolist()


def _kernel(size: int) -> np.ndarray:
    """Smoothing weights [size, size] over about one cell to each side."""
    distance = np.arange(size)[:, None] - np.arange(size)
    weights: np.ndarray = np.exp(-0.5 * (distance / 0.8) ** 2)
    return weights


_MOST_REQUESTS, _MOST_ROWS = 1024, 4096
_B, _NEAREST_B = _axis(8, _MOST_REQUESTS)
_T, _NEAREST_T = _axis(16, _MOST_ROWS)
_KERNEL_B, _KERNEL_T = _kernel(len(_B)), _kernel(len(_T))
_B_LIST, _T_LIST = _B.tolist(), _T.tolist()
_TICK = 1e-9  # seconds: a clock, a virtual one above all, may not have moved
_FIRST = 5  # observations of a cell until its median counts as settled
_CLIP = 0.12  # largest log residual believed at once: an outlier moves nothing much
_FAR = 0.2  # log distance from the model that a cell of few measurements is doubted at
_DRIFT = 1 / 32  # share of a settled cell's residual
_RETURN = 1 - 1 / 256  # drift fades: what lasts goes into the cells
_SHARES = np.array([0.4, 0.1, 0.5])  # of c0, cB B and cT T in a step, until measurements say otherwise


@dataclass(slots=True)
class _Cell:
    """Log seconds at a pair of knots (B, T), without drift."""

    count: int = 0
    log: float = 0.0
    recent: list[float] = field(default_factory=list)  # until `_FIRST` came: the estimate is their median


class CostSurface:
    """Seconds as a function of (B, T), T >= B, never falling in either. Forgets: old measurements fade."""

    def __init__(self, memory: int = 128):
        """`memory`: observations of a cell that its estimate is spread over."""
        self._memory = memory
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._drift = 0.0  # log
        self._seen = self._stale = 0
        self._model = [0.0, 0.0, 0.0]
        self._table = np.zeros((len(_B), len(_T)))  # seconds at [B, T], without drift
        self.version = 0  # grows when the table is made anew

    @property
    def is_known(self) -> bool:
        """Whether anything was observed; nothing may be asked before."""
        return self._seen > 0

    def observe(self, B: int, T: int, seconds: float) -> None:
        """One forward of B requests and T rows took `seconds`. Mutates the estimates."""
        at = _NEAREST_B[min(B, _MOST_REQUESTS)], _NEAREST_T[min(T, _MOST_ROWS)]
        cell = self._cells.get(at)
        if cell is None:
            cell = self._cells[at] = _Cell()
        log = math.log(max(seconds, _TICK)) - self._drift + self._to_knot(at, B, T)
        cell.count += 1
        self._seen += 1
        if cell.count <= _FIRST:
            cell.recent.append(log)
            cell.log = median(cell.recent)
            self._stale += 2
        else:
            residual = min(_CLIP, max(-_CLIP, log - cell.log))
            cell.log += residual / min(cell.count, self._memory)
            self._drift = self._drift * _RETURN + residual * _DRIFT
            self._stale += 1

    def _to_knot(self, at: tuple[int, int], B: int, T: int) -> float:
        """Log ratio of the model's seconds at the cell's knots to those at (B, T)."""
        b, t = _B_LIST[at[0]], _T_LIST[at[1]]
        if (b == B and t == T) or not self.version:
            return 0.0
        c0, per_request, per_row = self._model
        return math.log((c0 + per_request * b + per_row * t) / (c0 + per_request * B + per_row * T))

    def seconds(self, B: int, T: int) -> float:
        """Expected (median) seconds of a forward of B requests and T rows."""
        if self._stale:
            self._make_table()
        return float(self.curve(B, np.array([T]))[0])

    def curve(self, B: int, T: np.ndarray) -> np.ndarray:
        """Seconds float64 at each of the row counts `T` int [..], for B requests."""
        assert self._seen, "nothing was measured yet"
        self.refresh()
        low = min(bisect_right(_B_LIST, B), len(_B_LIST) - 1) - 1
        share = min(1.0, (B - _B_LIST[low]) / (_B_LIST[low + 1] - _B_LIST[low]))
        row = self._table[low] + share * (self._table[low + 1] - self._table[low])
        beyond = np.maximum(T / _MOST_ROWS, 1.0)
        curve: np.ndarray = np.interp(T, _T, row) * beyond * math.exp(self._drift)
        return curve

    def refresh(self) -> None:
        """Takes in what was observed since the last time, if that is much. Mutates `version` and the table."""
        if self._stale >= min(64, 2 + self._seen // 2):
            self._make_table()

    def _make_table(self) -> None:
        """Fits the model to the cells, and bends it to pass by them."""
        b, t = np.array(list(self._cells)).T
        count, log = np.array([(cell.count, cell.log) for cell in self._cells.values()]).T
        count = np.minimum(count, self._memory)
        seconds, trust = np.exp(log), np.minimum(count, 16)
        fitted = _fit(_B[b], _T[t], seconds, trust)
        # A cell of few measurements that is far off the model may be an outlier: it must not drag the model along.
        off = np.abs(log - np.log(fitted[0] + fitted[1] * _B[b] + fitted[2] * _T[t]))
        believed = np.where(count < _FIRST, np.minimum(1.0, _FAR / np.maximum(off, _FAR)) ** 2, 1.0)
        fitted = _fit(_B[b], _T[t], seconds, trust * believed)
        self._model = fitted.tolist()
        model = fitted[0] + fitted[1] * _B[:, None] + fitted[2] * _T
        ratio = log - np.log(model[b, t])
        count = count * believed
        weight, weighted = np.zeros(model.shape), np.zeros(model.shape)
        weight[b, t] = count
        weighted[b, t] = count * ratio
        bend = (_KERNEL_B @ weighted @ _KERNEL_T) / (_KERNEL_B @ weight @ _KERNEL_T + 2.0)
        own = count**2 / (count**2 + 4.0)  # a cell measured often needs no neighbours
        bend[b, t] += own * (ratio - bend[b, t])
        known = count >= 2
        self._table = _monotone(model * np.exp(bend), b[known], t[known])
        self._stale = 0
        self.version += 1

    def state_dict(self) -> dict[str, Any]:
        """The cells and the drift."""
        cells = [[b, t, cell.count, cell.log, list(cell.recent)] for (b, t), cell in self._cells.items()]
        return {"cells": cells, "drift": self._drift, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict`'s."""
        self._cells = {(b, t): _Cell(n, log, list(recent)) for b, t, n, log, recent in state["cells"]}
        self._drift, self._seen = float(state["drift"]), int(state["seen"])
        if self._seen:
            self._make_table()


def _monotone(table: np.ndarray, b: np.ndarray, t: np.ndarray) -> np.ndarray:
    """`table` made to rise along both axes, through the lower hull of its measured cells [b, t]: outliers are high."""
    most = np.full(table.shape, np.inf)
    most[b, t] = table[b, t]
    for axis in (0, 1):
        most = np.flip(np.minimum.accumulate(np.flip(most, axis), axis=axis), axis)
    table = np.minimum(table, most)
    for axis in (0, 1):
        table = np.maximum.accumulate(table, axis=axis)
    return table


def _fit(B: np.ndarray, T: np.ndarray, seconds: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Non-negative (c0, cB, cT) of the least weighted squares of relative errors.

    A weak prior (`_SHARES` of the mean cell) decides what the cells leave open.
    """
    total = weight.sum()
    scale = float(np.exp((weight * np.log(seconds)).sum() / total))
    units = np.array([1.0, (weight * B).sum() / total, (weight * T).sum() / total])
    features = np.stack((np.ones(len(B)), B, T), axis=1) / units * (scale / seconds)[:, None]
    strength = 0.05
    normal = (features * weight[:, None]).T @ features + strength * np.eye(3)
    target = weight @ features + strength * _SHARES
    kept = np.arange(3)
    while True:
        solved = np.linalg.solve(normal[np.ix_(kept, kept)], target[kept])
        if solved.min() >= 0:
            break
        kept = np.delete(kept, solved.argmin())
    model = np.zeros(3)
    model[kept] = solved
    model[0] = max(model[0], 1e-3)  # a forward of nothing still takes some time: keeps logarithms finite
    return model * scale / units


class StepCosts(CostSurface):
    """Seconds of a policy forward by running requests B and rows T (roots and drafted tokens)."""


class DraftCosts:
    """Seconds of a drafter's `propose` by requests B and tokens drafted for all of them: a(B) + b(B) * tokens."""

    def __init__(self, kind: str):
        self.kind = kind
        self._surface = CostSurface()

    @property
    def is_known(self) -> bool:
        """Whether anything was observed."""
        return self._surface.is_known

    def observe(self, B: int, tokens: int, seconds: float) -> None:
        """A call for B requests drafted `tokens` tokens in all and took `seconds`. Mutates the estimates."""
        self._surface.observe(B, B + tokens, seconds)

    def seconds(self, B: int, tokens: int) -> float:
        """Expected seconds of a call."""
        return self._surface.seconds(B, B + tokens)

    def line(self, B: int, tokens: int) -> tuple[float, float]:
        """(a, b): seconds of a call, and of each token that it drafts, averaged over the first `tokens` >= 1."""
        none, some = self._surface.curve(B, np.array([B, B + tokens])).tolist()
        return none, (some - none) / tokens

    def state_dict(self) -> dict[str, Any]:
        """See `CostSurface.state_dict`."""
        return {"kind": self.kind, "surface": self._surface.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict`'s of the same kind of drafter (ValueError otherwise)."""
        if state["kind"] != self.kind:
            raise ValueError(f"costs of drafter {state['kind']!r}, not of {self.kind!r}")
        self._surface.load_state_dict(state["surface"])
