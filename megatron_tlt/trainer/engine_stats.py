"""Counters of a rollout engine, added up."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any

from megatron_tlt.types import EngineStats

# Lists of moments, one behind the other; other lists are counts by index.
_MOMENTS = {"parked_spans", "switches"}


def joined(first: EngineStats, second: EngineStats) -> EngineStats:
    """Both as one; `second` is the later one."""
    later = second.started - first.started
    curve = [*first.running_curve, *((at + later, running) for at, running in second.running_curve)]
    return replace(_sum("", first, second), started=first.started, running_curve=curve)


def _sum(name: str, first: Any, second: Any) -> Any:
    """Of two values of the field `name`: sums, by key, by index or one behind the other."""
    if is_dataclass(first):
        names = [field.name for field in fields(first)]
        return type(first)(**{n: _sum(n, getattr(first, n), getattr(second, n)) for n in names})  # type: ignore[misc]
    if isinstance(first, dict):
        return {k: _sum("", first[k], second[k]) if k in first and k in second else (first | second)[k]
                for k in {**first, **second}}  # fmt: skip
    if isinstance(first, list) and name not in _MOMENTS:
        return [a + b for a, b in zip_longest(first, second, fillvalue=0)]
    return first + second
