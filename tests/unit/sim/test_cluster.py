import numpy as np
import pytest

from benchmarks.gpu.bounds import train_flops
from megatron_tlt.sim.cluster import Cluster
from tests.helpers.sim import sim_config


def test_updates_cost_operations_over_the_gpus():
    cluster, responses = Cluster(sim_config()), np.full(1000, 10)
    assert cluster.update(responses) == pytest.approx(8 * 7.6157e9 * 1e4 / (8 * 989e12 * 0.35), rel=0.001)
    assert Cluster(sim_config("cluster.nodes=2")).update(responses) == pytest.approx(cluster.update(responses) / 2)
    assert cluster.logprobs(responses) == pytest.approx(cluster.update(responses) / 2)  # 2 x 2 of 8
    measured = Cluster(sim_config("training.update_us_per_token=80", "training.update_ms=500"))
    assert measured.update(responses) == pytest.approx(0.5 + 80e-6 * 10_000 / 4)  # 4 replicas of tp 2


def test_attention_of_long_responses_costs_more_than_their_parameters():
    """As `benchmarks/gpu/bounds.py` counts it, which leaves out the embedding."""
    config = sim_config("training.recompute=false")
    assert config.model is not None
    found = Cluster(config).update(np.full(8, 131072))
    assert found == pytest.approx(train_flops(config.model, 8, 131072) / (8 * 989e12 * 0.35), rel=0.05)
    assert found > 2 * Cluster(config).update(np.full(8 * 1024, 128))


def test_a_weight_sync_goes_over_the_network_between_nodes():
    one, two = Cluster(sim_config()), Cluster(sim_config("cluster.nodes=2"))
    assert two.weight_sync() - one.weight_sync() == pytest.approx(2 * 7.6157e9 / 50e9, rel=0.001)
    assert Cluster(sim_config("training.push_seconds=1.5")).weight_sync() == 1.5
