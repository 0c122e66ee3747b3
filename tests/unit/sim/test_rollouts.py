"""Rollouts against the exact replica: the same requests, token by token through the production code."""

import statistics
from dataclasses import replace

import numpy as np
import pytest

from megatron_tlt.sim.cost_model import build_costs
from megatron_tlt.sim.decisions import Decider
from megatron_tlt.sim.rollouts import Rollouts
from tests.helpers.sim import ExactReplica, groups_of, sim_config

SELECTORS = {
    "plain": ("rollout.speculation.drafter=none", 0.02),
    "fixed": ("rollout.speculation.selector=fixed", 0.08),
    "beg_mab": ("rollout.speculation.selector=beg_mab", 0.12),
    "cost_model": ("rollout.speculation.selector=cost_model", 0.12),
}


def both(config, groups, rounds=1):
    """The exact replica (means of its rounds but the first) and the simulated one."""
    costs = build_costs(config)
    exact = ExactReplica(config, costs, (0,))
    exact.speculation.set_quality(1.0)
    found = [exact.run(groups) for _ in range(rounds)]
    later = found[1:] or found  # in the first the selector tries its arms
    last = replace(found[-1], seconds=statistics.mean(r.seconds for r in later))
    table = Decider(config, costs, sum(len(g) for g in groups)).table(1.0)
    (simulated,) = Rollouts(config, costs, 1).run(np.array(groups), table)
    return last, simulated


@pytest.mark.parametrize("name", SELECTORS)
def test_seconds_are_those_of_the_exact_engine(name):
    override, allowed = SELECTORS[name]
    spec = "rollout.speculation.drafter=eagle"
    groups = groups_of(0, 3, 8)
    exact, simulated = both(sim_config(spec, override), groups, rounds=1 if name == "plain" else 5)
    assert simulated.seconds == pytest.approx(exact.seconds, rel=allowed)
    assert simulated.lengths.tolist() == exact.lengths.tolist() == sorted(np.concatenate(groups))


def test_memory_pressure_preempts_in_both():
    config = sim_config("rollout.kv_cache_mib=160", "rollout.speculation.drafter=none", "workload.prompt_tokens=64")
    exact, simulated = both(config, groups_of(2, 4, 4, 400.0))
    assert exact.preemptions > 0
    assert simulated.preemptions > 0
    assert simulated.seconds == pytest.approx(exact.seconds, rel=0.2)


def test_nothing_is_drafted_above_the_threshold():
    config = sim_config("rollout.speculation.drafter=eagle", "plain_above=5")
    costs = build_costs(config)
    table = Decider(config, costs, 16).table(1.0)
    for running in (4, 5, 6, 16):
        seconds, tokens, _ = table.at(running, 1000.0)
        plain = costs.step(running, running, 1000.0 * running, False)
        if running > 5:
            assert tokens == 1.0 and seconds == pytest.approx(plain, rel=0.01)
        else:
            assert tokens > 1.5 and seconds < 0.8 * plain


def test_a_replica_with_room_pulls_the_next_prompt():
    """Two replicas run two requests each; one has the long response. Prompts that are dealt out wait behind it."""
    lengths = np.array([[1500, 1500], [100, 100], *[[300, 300]] * 6])
    found = {}
    for schedule in ("pull", "static"):
        config = sim_config(
            "rollout.speculation.drafter=none", "rollout.max_running_requests=2", f"rollout.schedule={schedule}"
        )
        costs = build_costs(config)
        found[schedule] = Rollouts(config, costs, 2).run(lengths, Decider(config, costs, 2).table(0.0))
    assert [r.lengths.sum() for r in found["pull"]] == [2 * 1800, 2 * 1600]
    assert [r.lengths.sum() for r in found["static"]] == [2 * 2400, 2 * 1000]
    slowest = {name: max(r.seconds for r in rollouts) for name, rollouts in found.items()}
    assert slowest["pull"] / slowest["static"] == pytest.approx(1800 / 2400, rel=0.03)
