import numpy as np
import pytest

from benchmarks.gpu.bounds import train_flops
from megatron_tlt.config.drafter_kinds import DRAFTERS
from megatron_tlt.sim.cluster import Cluster
from tests.helpers.sim import MODEL, sim_config


def test_updates_cost_operations_over_the_gpus():
    cluster, responses = Cluster(sim_config()), np.full(1000, 10)
    assert cluster.update(responses) == pytest.approx(8 * 7.6157e9 * 1e4 / (8 * 989e12 * 0.35), rel=0.001)
    assert Cluster(sim_config("cluster.nodes=2")).update(responses) == pytest.approx(cluster.update(responses) / 2)
    assert cluster.logprobs(responses) == pytest.approx(cluster.update(responses) / 2)  # 2 x 2 of 8


@pytest.mark.parametrize(("recompute", "operations"), [("true", 6), ("false", 4)])
def test_frozen_weights_of_adapters_have_no_gradients(recompute, operations):
    overrides, long = ["training.lora=true", f"training.recompute={recompute}"], np.full(1, 131072)
    responses = np.full(1000, 10)
    found = Cluster(sim_config(*overrides)).update(responses)
    assert found == pytest.approx(operations * 7.6157e9 * 1e4 / (8 * 989e12 * 0.35), rel=0.001)
    saved = Cluster(sim_config(overrides[1])).update(long) - Cluster(sim_config(*overrides)).update(long)
    assert saved == pytest.approx(2 * 7.6157e9 * 131072 / (8 * 989e12 * 0.35), rel=0.001), "attention's stay"


def test_a_teacher_scores_once_beside_the_passes_of_the_policy():
    teacher = MODEL | {"num_layers": 56, "tie_word_embeddings": False}
    config = sim_config("training.logprob_passes=1", training={"teacher": teacher})
    alone, other = (sim_config("training.logprob_passes=1", model=model) for model in (MODEL, teacher))
    found, *parts = (Cluster(of).logprobs(np.full(100, 1000)) for of in (config, alone, other))
    assert found == pytest.approx(sum(parts)) and parts[1] > 1.8 * parts[0]


def test_attention_of_long_responses_costs_more_than_their_parameters():
    """As `benchmarks/gpu/bounds.py` counts it, which leaves out the embedding."""
    config = sim_config("training.recompute=false")
    found = Cluster(config).update(np.full(8, 131072))
    assert found == pytest.approx(train_flops(config.model, 8, 131072) / (8 * 989e12 * 0.35), rel=0.05)
    assert found > 2 * Cluster(config).update(np.full(8 * 1024, 128))


def test_a_weight_sync_goes_over_the_network_between_nodes():
    one, two = Cluster(sim_config()), Cluster(sim_config("cluster.nodes=2"))
    assert two.weight_sync() - one.weight_sync() == pytest.approx(2 * 7.6157e9 / 50e9, rel=0.001)


@pytest.mark.parametrize(("drafter", "passes", "of_two"), [("eagle", 1, 2), ("eagle3", 3, 2), ("dspark", 1, 1)])
def test_a_micro_step_has_a_pass_for_each_position_that_it_drafts(drafter, passes, of_two):
    given = f"rollout.speculation.drafter={drafter}", "training.micro_step_tokens=4096"
    facts = DRAFTERS[drafter]
    config = sim_config(*given)
    one = 6 * facts.read_elements(config.model, 4096) * 4096 / (989e12 * 0.35)
    assert Cluster(config).micro_step() == pytest.approx(passes * one + 2e-3)
    assert Cluster(sim_config(*given, "training.draft_steps=2")).micro_step() == pytest.approx(of_two * one + 2e-3)
