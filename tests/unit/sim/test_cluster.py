import pytest

from megatron_tlt.sim.cluster import Cluster
from tests.helpers.sim import sim_config


def test_updates_cost_operations_over_the_gpus():
    cluster = Cluster(sim_config())
    operations = 8 * 7.6157e9 * 1e6
    assert cluster.update(1_000_000) == pytest.approx(operations / (8 * 989e12 * 0.35), rel=0.001)
    assert Cluster(sim_config("cluster.nodes=2")).update(10**6) == pytest.approx(cluster.update(10**6) / 2)
    assert cluster.logprobs(10**6) == pytest.approx(cluster.update(10**6) / 2)  # 2 x 2 of 8
    measured = Cluster(sim_config("training.update_us_per_token=80", "training.update_ms=500"))
    assert measured.update(1000) == pytest.approx(0.5 + 80e-6 * 1000 / 4)  # 4 replicas of tp 2


def test_pushes_go_over_the_network_between_nodes():
    one, two = Cluster(sim_config()), Cluster(sim_config("cluster.nodes=2"))
    assert two.push() - one.push() == pytest.approx(2 * 7.6157e9 / 50e9, rel=0.001)
    assert Cluster(sim_config("training.push_seconds=1.5")).push() == 1.5
