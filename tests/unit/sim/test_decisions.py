import numpy as np

from megatron_tlt.sim.cost_model import build_costs
from megatron_tlt.sim.decisions import Decider
from tests.helpers.sim import sim_config


def test_a_selector_that_rests_is_never_much_slower_than_plain_decoding():
    """It rests for up to 128 steps at once: means over fewer steps would be all drafts or none."""
    poor = ("drafters.eagle.rates=[0.6]", "drafters.eagle.stale_rates=[0.3]", "rollout.max_tokens=32768")
    config = sim_config("rollout.speculation.drafter=eagle", *poor)
    costs, most = build_costs(config), 96
    plain = Decider(sim_config("rollout.max_tokens=32768"), costs, most).table(0.0)
    for quality in (0.0, 1.0):
        table = Decider(config, costs, most).table(quality)
        gains = (plain.seconds / table.seconds)[1:]
        assert gains.min() > 0.85
        if quality:
            assert (gains[table.requests[table.requests > 8] - 1].max(axis=1) > 1.1).all()
    assert all(sum(tally.steps.values()) == 512 for tally in table.tallies.values())
    assert (np.diff(table.requests) > 0).all()
