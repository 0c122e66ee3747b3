"""Pre-rollouts: tiny cases by hand, no drift at all and nothing but drift, and the drift that was measured."""

import numpy as np
import pytest

from megatron_tlt.idle.policy import Action
from megatron_tlt.sim import simulate as simulate_module
from megatron_tlt.sim.drift import Drift
from megatron_tlt.sim.idle import IdleTime
from megatron_tlt.sim.modes import in_mode
from megatron_tlt.sim.simulate import Simulation
from tests.helpers.sim import few_steps, sim_config, straight  # noqa: F401

TWO = {
    "cluster": {"nodes": 1, "gpus_per_node": 2},
    "workload": {"steps": 2, "prompts_per_step": 2, "lengths": {"values": [20, 100]}},
    "rollout": {"samples_per_prompt": 1, "max_tokens": 200, "speculation": {"selector": "fixed"}},
}
NO_WAIT = "idle.min_tail_seconds=0.0"


class SecondsPerStep:
    """A second a step, whatever it verifies."""

    def step(self, B, T, C, speculating):
        return 1.0

    def draft(self, kind, B, length):
        return 0.0

    def prefill(self, tokens):
        return 0.0


@pytest.fixture
def a_second_each(monkeypatch):
    monkeypatch.setattr(simulate_module, "build_costs", lambda config: SecondsPerStep())


def run(mode, *overrides, **sections):
    return Simulation(in_mode(sim_config(*overrides, **sections), mode)).run(mode)


def test_two_replicas_and_one_long_response(a_second_each):
    """Prefill gives the first token. The replica with 20 tokens ends at 19 s, the other at 99 s: in 80 s the former
    decodes 81 tokens of the next long response. These are 80 behind the first, 32 a step; 19 more take a step each.
    """
    point = run("pre", NO_WAIT, "pre_rollouts.hazard=0.0", **TWO)
    assert [record.phases["rollout"] for record in point.steps] == [99.0, 80 / 32 + 19]
    first, second = point.steps
    assert first.pre_rolling_gpu_seconds == 80.0 and second.pre_rolling_gpu_seconds == 0.0
    assert (first.matching_tokens, second.matching_tokens) == (0, 81), "one request at once is its share of a step"


def test_where_nothing_matches_only_the_window_costs(a_second_each):
    """All ranks wait for half of a decoding step, and get 81 token ids."""
    nothing = (NO_WAIT, "pre_rollouts.hazard=1.0", "pre_rollouts.found=0.0")
    off, pre = run("off", **TWO), run("pre", *nothing, **TWO)
    for a, b in zip(off.steps, pre.steps, strict=True):
        assert b.phases["rollout"] == a.phases["rollout"] == 99.0
    cost = pre.steps[0].seconds - off.steps[0].seconds
    assert cost == pytest.approx(0.5 + 4 * 81 / 50e9, rel=1e-9)
    assert pre.steps[1].seconds == off.steps[1].seconds


def test_what_is_passed_on_is_bounded(a_second_each):
    """0.0003 MiB are 78 tokens: a response of 81 does not fit."""
    point = run("pre", NO_WAIT, "pre_rollouts.hazard=0.0", "idle.pre_rollout_mib=0.0003", **TWO)
    assert [record.phases["rollout"] for record in point.steps] == [99.0, 99.0]


def test_the_policy_shares_the_window(monkeypatch):
    """It trains twice, then pre-rolls once, then trains again, in whatever order it says so."""

    def decide(section, view):
        return Action.PRE_ROLL if view.steps >= 2 and view.can_pre_roll else Action.TRAIN

    monkeypatch.setattr("megatron_tlt.sim.idle.decide", decide)
    seen = []

    def pre_roll(starts, until):
        seen.append(list(starts))
        return [start + 1.0 for start in starts]

    waits = IdleTime(sim_config("idle.train_drafter=true"), 0.5).waits(straight([2.0, 6.0]), pre_roll)
    assert seen == [[3.0, float("inf")]]
    assert waits.pre_rolls.tolist() == [1.0, 0.0]
    assert waits.trains.tolist() == [pytest.approx(3.0), 0.0] and waits.micro_steps == 6


def test_the_production_rule_gives_training_a_quarter():
    config = sim_config("idle.train_drafter=true")
    idle = IdleTime(config, 0.1)
    for _ in range(8):
        waits = idle.waits(straight([2.0, 10.0]), lambda starts, until: [until for _ in starts])
    assert waits.trains[0] == pytest.approx(2.0, abs=0.2) and waits.pre_rolls[0] == pytest.approx(6.0, abs=0.2)


def test_hazard_and_steps_of_a_matching_row():
    drift = Drift(sim_config("pre_rollouts.hazard=0.01").pre_rollouts)
    there, rng = np.full((4000, 1), 10_000), np.random.default_rng(0)
    for updates, hazard in ((1, 0.01), (4, 0.01 * 4**0.65)):
        found = drift.matching(there, np.full_like(there, updates), rng)
        assert found.mean() == pytest.approx(1 / hazard - 1, rel=0.05)
    tokens = drift.emitted(np.full(4000, 31), rng).mean()
    assert tokens == pytest.approx(sum(0.99**i for i in range(32)), rel=0.02)
    assert drift.tokens_matching(31, 1.0) == pytest.approx(sum(0.99**i for i in range(32)))


# SmolLM2-135M, by updates apart: share of equal responses, of tokens before a mismatch; tokens a step by draft length
MEASURED = {
    1: (163 / 192, 0.92, {3: 3.79, 7: 7.03, 15: 12.14, 31: 18.90}),
    11: (99 / 192, 0.66, {3: 3.25, 7: 5.15, 15: 6.87, 31: 8.18}),
}
RESPONSE = 162  # tokens: of this length 85 % stay equal at a hazard of 0.001 a token


@pytest.mark.parametrize("updates", MEASURED)
def test_the_drift_is_the_measured_one(updates):
    """One length stands for all; on average the last step of a matching part is half used."""
    equal, before, steps = MEASURED[updates]
    drift, rng = Drift(sim_config().pre_rollouts), np.random.default_rng(0)
    there = np.full((20_000, 1), RESPONSE)
    found = drift.matching(there, np.full_like(there, updates), rng)
    assert (found == RESPONSE).mean() == pytest.approx(equal, abs=0.06)
    assert found.mean() / RESPONSE == pytest.approx(before, abs=0.04)
    for longest, tokens in steps.items():
        behind, _ = drift.tokens_parted(longest, 1.0)
        needed = found.mean() / (longest + 1) + 0.5 + (RESPONSE - found.mean()) / behind
        assert RESPONSE / needed == pytest.approx(tokens, rel=0.12)


def test_rates_and_a_decoding_step_are_of_a_replica_s_share(monkeypatch):
    """Which is all that it has at once, in idle time, too."""
    asked, steps = [], []
    costs = SecondsPerStep()
    costs.step = lambda B, T, C, speculating: steps.append(B) or 1.0
    monkeypatch.setattr(simulate_module, "build_costs", lambda config: costs)
    monkeypatch.setattr(simulate_module, "Decider", lambda config, costs, most: asked.append(most))
    Simulation(in_mode(sim_config(**TWO), "pre"))
    assert asked == steps == [1], "of two prompts on two replicas"
