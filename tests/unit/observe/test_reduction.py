"""How metrics of ranks are reduced."""

from __future__ import annotations

import pytest

from megatron_tlt.observe.reduction import Metric, Reduce, reduced, sums, values_of


def test_each_kind_of_metric() -> None:
    ranks = [
        {
            **sums({"idle/seconds": 1, "a_max": 3}),
            "peak": Metric(4.0, Reduce.MAX),
            "loss": Metric(1.0, Reduce.MEAN),
            "reward": Metric(6.0, Reduce.MEAN, 3),
        },
        {
            **sums({"idle/seconds": 2.0, "a_max": 2}),
            "peak": Metric(-5.0, Reduce.MAX),
            "loss": Metric(2.0, Reduce.MEAN),
            "reward": Metric(0.0, Reduce.MEAN, 0),
        },
        {},
    ]
    assert values_of(ranks) == {"a_max": 5.0, "idle/seconds": 3.0, "loss": 1.5, "peak": 4.0, "reward": 2.0}
    assert values_of([reduced([*ranks, *ranks[:1]]), ranks[1]]) == values_of([*ranks, *ranks[:2]]), "first of windows"
    assert values_of([{"reward": Metric(0.0, Reduce.MEAN, 0)}]) == {"reward": 0.0}


def test_ranks_that_reduce_a_metric_differently_are_an_error() -> None:
    with pytest.raises(ValueError, match="unpack"):
        reduced([sums({"loss": 1.0}), {"loss": Metric(1.0, Reduce.MEAN)}])
