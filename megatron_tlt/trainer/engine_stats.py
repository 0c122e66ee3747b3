"""Counters of a rollout engine, added up."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any

from megatron_tlt.types import EngineStats


def joined(first: EngineStats, second: EngineStats) -> EngineStats:
    """Both as one; `second` is the later one."""
    later = second.started - first.started
    curve = [*first.running_curve, *((at + later, running) for at, running in second.running_curve)]
    total: EngineStats = _sum(first, second)
    return replace(total, started=first.started, running_curve=curve)


def _sum(first: Any, second: Any) -> Any:
    """Of two numbers, of counts by key or index, of records by field; lists of moments one behind the other."""
    if is_dataclass(first):
        names = [of.name for of in fields(first)]
        return replace(first, **{name: _sum(getattr(first, name), getattr(second, name)) for name in names})  # type: ignore[type-var]
    if isinstance(first, dict):
        return {**first, **second} | {key: _sum(first[key], second[key]) for key in first.keys() & second.keys()}
    if isinstance(first, list) and not any(isinstance(item, tuple) for item in (*first, *second)):
        return [a + b for a, b in zip_longest(first, second, fillvalue=0)]
    return first + second
