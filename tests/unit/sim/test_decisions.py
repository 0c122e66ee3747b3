import numpy as np

from megatron_tlt.sim.cost_model import build_costs
from megatron_tlt.sim.decisions import Decider
from megatron_tlt.sim.speculation import Speculation
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


def test_a_step_without_room_for_whole_drafts_says_how_long_they_could_be():
    """As the engine's: longer ones would count as rejected."""
    eagle = (
        "rollout.speculation.drafter=eagle",
        "rollout.speculation.selector=fixed",
        "rollout.speculation.draft_len=8",
    )
    config, recorded = sim_config(*eagle), []
    speculation = Speculation(config, build_costs(config), (0,))
    speculation._selector.record = recorded.append
    for running in (4, 2048):  # of 8,192 rows
        speculation.step(running, 1000.0 * running)
    assert [m.longest for m in recorded] == [8, 3]
