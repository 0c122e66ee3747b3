import numpy as np

from megatron_tlt.sim.cost_model import build_costs
from megatron_tlt.sim.decisions import Decider
from tests.helpers.sim import sim_config


def test_the_cost_model_is_never_much_slower_than_plain_decoding():
    poor = ("drafters.trained.rates=[0.6]", "drafters.trained.stale_rates=[0.3]", "rollout.max_tokens=32768")
    config = sim_config("rollout.speculation.drafter=eagle", *poor)
    costs, most = build_costs(config), 96
    plain = Decider(sim_config("rollout.max_tokens=32768"), costs, most).table(0.0)
    for quality in (0.0, 1.0):
        table = Decider(config, costs, most).table(quality)
        gains = (plain.rates[0, ..., 0] / table.rates[0, ..., 0])[1:]
        assert gains.min() > 0.85
        if quality:
            assert (gains[table.requests[table.requests > 8] - 1].max(axis=1) > 1.1).all()
    assert (np.diff(table.requests) > 0).all()
