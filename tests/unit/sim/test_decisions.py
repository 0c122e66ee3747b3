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


EAGLE = ("rollout.speculation.drafter=eagle", "rollout.speculation.selector=fixed", "rollout.speculation.draft_len=8")


def test_a_step_without_room_for_whole_drafts_says_how_long_they_could_be():
    """As the engine's: longer ones would count as rejected."""
    config, recorded = sim_config(*EAGLE, "rollout.max_batched_tokens=1024"), []
    speculation = Speculation(config, build_costs(config), (0,))
    speculation._selector.record = recorded.append
    for running in (4, 256):  # of 1,024 rows
        speculation.step(running, 1000.0 * running)
    assert [m.longest for m in recorded] == [8, 3]


def test_drafts_beside_pre_rolled_tokens_get_what_these_leave_of_a_verifying_step():
    """2,304 rows verify 256 requests with 8 drafted tokens each: 64 pre-rolled drafts of 31 leave 64 of them."""
    config, verified = sim_config(*EAGLE), []
    costs = build_costs(config)
    speculation = Speculation(config, costs, (0,))
    costs.step = lambda B, T, C, speculating: verified.append(T) or 1.0
    speculation.step(256, 256 * 1000.0, matching=64)
    assert verified == [256 + 64 * 31], "too few rows for a token of each of the other 192"
