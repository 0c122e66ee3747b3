"""How a metric of one rank is reduced over ranks: said where the metric is made."""

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
    """Metrics of several windows or ranks as one; names may be missing. A mean of no values is 0.

    Means are sums over all values, divided once: they do not depend on which rank generated which response.
    """
    result = {}
    for name in sorted({name for row in rows for name in row}):
        found = [row[name] for row in rows if name in row]
        (how,) = {metric.reduce for metric in found}
        value = (max if how is Reduce.MAX else sum)(metric.value for metric in found)
        result[name] = Metric(value / max(1.0, sum(m.count for m in found)) if how is Reduce.MEAN else value, how)
    return result


def values_of(rows: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """The values of all ranks' metrics, `reduced`."""
    return {name: metric.value for name, metric in reduced(rows).items()}
