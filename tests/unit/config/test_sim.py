import pytest

from megatron_tlt.config.checks.sim import check_sim
from megatron_tlt.errors import ConfigError
from tests.helpers.sim import sim_config


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["rollout.tp=3"], "rollout.tp"),
        (["rollout.tp=8"], "rollout.tp"),  # of 4 key/value heads
        (["rollout.tp=4", "cluster.gpus_per_node=2", "cluster.nodes=2"], "rollout.tp"),  # over two nodes
        (["rollout.carry_over=64"], "rollout.carry_over"),
        (["workload.lengths.path=l.txt", "workload.lengths.values=[3]"], "workload.lengths.path"),
        (["drafters.trained.rates=[]"], "drafters.trained.rates"),
        (["drafters.suffix.rates=[1.0]"], "drafters.suffix.rates"),
        (["drafters.trained.stale_rates=[-0.1]"], "drafters.trained.stale_rates"),
        (["drafters.suffix.stale_rates=[0.5]"], "drafters.suffix.stale_rates"),
    ],
)
def test_what_does_not_go_together_is_named(overrides, path):
    assert path in [problem.path for problem in check_sim(sim_config(*overrides))]


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("nodes=32", "cluster.nodes"),
        ("node=32", "cluster.nodes"),
        ("lengths.path=x", "workload.lengths"),
        ("tp=2", "rollout.tp"),
        ("traning.mfu=2", "training"),
        ("models={}", "model"),
    ],
)
def test_unknown_sections_are_looked_for_one_level_down_too(override, nearest):
    with pytest.raises(ConfigError) as caught:
        sim_config(override)
    assert f"did you mean {nearest}?" in str(caught.value)
