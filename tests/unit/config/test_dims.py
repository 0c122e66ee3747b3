import itertools

import pytest

from megatron_tlt.config.dims import Dims, rollout_replica
from megatron_tlt.errors import ConfigError


@pytest.mark.parametrize(("tp", "cp", "dp", "pp"), list(itertools.product((1, 2, 3), (1, 2), (1, 4), (1, 2))))
def test_coordinates_and_rank_at_are_inverse(tp, cp, dp, pp):
    dims = Dims(tp, cp, dp, pp)
    seen = set()
    for rank in range(dims.world_size):
        at = dims.coordinates(rank)
        assert dims.rank_at(at.tp, at.cp, at.dp, at.pp) == rank
        seen.add((at.tp, at.cp, at.dp, at.pp))
    assert len(seen) == tp * cp * dp * pp


def test_order_is_megatrons_tensor_fastest_pipeline_slowest():
    dims = Dims.fit(8, tp=2, pp=2)
    assert dims.dp == 2
    assert [dims.coordinates(r).tp for r in range(8)] == [0, 1] * 4
    assert [dims.coordinates(r).dp for r in range(8)] == [0, 0, 1, 1] * 2
    assert [dims.coordinates(r).pp for r in range(8)] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(("world", "tp", "pp"), [(6, 4, 1), (2, 2, 2), (3, 2, 1)])
def test_a_grid_that_does_not_fit_names_the_sizes(world, tp, pp):
    with pytest.raises(ConfigError, match=rf"number of ranks \({world}\)"):
        Dims.fit(world, tp=tp, pp=pp)


def test_rollout_replicas_are_consecutive_ranks():
    assert [rollout_replica(r, 2) for r in range(4)] == [0, 0, 1, 1]
