"""What is refused before a simulation starts."""

import pytest

from megatron_tlt.errors import ConfigError
from megatron_tlt.sim.limits import check_limits
from megatron_tlt.sim.modes import simulate
from tests.helpers.sim import sim_config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.gpu=rtx3090", "rollout.tp=1", "model.num_layers=80"], "does not fit"),
        (["cluster.gpu=rtx4090", "rollout.max_tokens=200000"], "does not fit"),
        (["cluster.nodes=100000000"], "too large to simulate"),
        (["workload.prompts_per_step=10000000"], "too large to simulate"),
        (["workload.steps=1000000"], "too large to simulate"),
    ],
)
def test_what_cannot_be_simulated_is_refused(overrides, said):
    with pytest.raises(ConfigError, match=said) as error:
        simulate([sim_config(*overrides)], ["off", "suffix"])
    assert len(error.value.problems) == 1


def test_what_the_documentation_simulates_is_within_the_limits():
    large = ("cluster.nodes=128", "workload.steps=100", "workload.prompts_per_step=1024", "rollout.tp=2")
    assert not list(check_limits([sim_config(*large)] * 4))
    assert not list(check_limits([sim_config()]))
