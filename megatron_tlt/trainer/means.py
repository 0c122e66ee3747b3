"""Metrics that are means over all ranks: each rank gives sums and counts, which are added before they are divided.

So a mean does not depend on which rank generated which response.
"""

from __future__ import annotations

from collections.abc import Mapping

_TOTAL, _COUNT = "sum/", "count/"


def sums_for_means(pairs: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """This rank's (sum, count) of each metric NAME as "sum/NAME" and "count/NAME", which ranks add up."""
    row = {_TOTAL + name: float(total) for name, (total, _) in pairs.items()}
    return row | {_COUNT + name: float(count) for name, (_, count) in pairs.items()}


def means_of_sums(row: dict[str, float]) -> dict[str, float]:
    """NAME, the mean of each pair of sums "sum/NAME" and "count/NAME". Removes the sums from `row`."""
    names = [name.removeprefix(_TOTAL) for name in row if name.startswith(_TOTAL)]
    return {name: row.pop(_TOTAL + name) / max(1.0, row.pop(_COUNT + name)) for name in names}
