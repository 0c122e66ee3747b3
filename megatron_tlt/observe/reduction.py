"""How a metric of one rank is reduced over ranks. The place that makes a metric says how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

Reduce = Enum("Reduce", "SUM MEAN MAX")


@dataclass(frozen=True, slots=True)
class Metric:
    """One rank's metric; of a mean `value` is the sum of `count` values."""

    value: float
    reduce: Reduce
    count: float = 1.0


RankMetrics = dict[str, Metric]


def sums(values: Mapping[str, float]) -> RankMetrics:
    """Metrics that are added up."""
    return {name: Metric(float(value), Reduce.SUM) for name, value in values.items()}


def reduced(rows: Sequence[Mapping[str, Metric]]) -> RankMetrics:
    """Metrics of several windows or ranks as one; names may be missing."""
    result = {}
    for name in sorted({name for row in rows for name in row}):
        found = [row[name] for row in rows if name in row]
        (how,) = {metric.reduce for metric in found}
        value = (max if how is Reduce.MAX else sum)(metric.value for metric in found)
        result[name] = Metric(value, how, sum(metric.count for metric in found))
    return result


def values_of(rows: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """The values of all ranks' metrics, `reduced`. A mean of no values is 0.

    A mean is the sum of all values, divided once: it does not depend on which rank generated which response.
    """
    whole = reduced(rows).items()
    return {name: m.value / max(1.0, m.count) if m.reduce is Reduce.MEAN else m.value for name, m in whole}
