"""The bulk engine against the exact one: the same requests, token by token through the production code."""

import statistics
from dataclasses import replace

import numpy as np
import pytest

from megatron_tlt.sim.bulk import BulkReplicas
from megatron_tlt.sim.cost_model import build_costs
from megatron_tlt.sim.decisions import Decider
from tests.helpers.exact_replica import ExactReplica
from tests.helpers.sim import groups_of, sim_config

SELECTORS = {
    "plain": ("rollout.speculation.drafter=none", 0.02),
    "fixed": ("rollout.speculation.selector=fixed", 0.08),
    "beg_mab": ("rollout.speculation.selector=beg_mab", 0.12),
    "cost_model": ("rollout.speculation.selector=cost_model", 0.12),
}


def both(config, groups, rounds=1):
    """Mean seconds and accept length of the exact engine's rounds but the first, its last one, and the bulk one."""
    costs = build_costs(config)
    exact = ExactReplica(config, costs, (0,))
    exact.speculation.set_quality(1.0)
    found = [exact.run(groups) for _ in range(rounds)]
    later = found[1:] or found  # in the first the selector tries its arms
    last = replace(
        found[-1],
        times=np.array([0.0, statistics.mean(r.seconds for r in later)]),
        accept_length=statistics.mean(r.accept_length for r in later),
    )
    table = Decider(config, costs, sum(len(g) for g in groups)).table(1.0)
    return last, BulkReplicas(config, costs).run(groups, table)


@pytest.mark.parametrize("name", SELECTORS)
def test_seconds_are_those_of_the_exact_engine(name):
    override, allowed = SELECTORS[name]
    spec = "rollout.speculation.drafter=eagle"
    groups = groups_of(0, 3, 8)
    exact, bulk = both(sim_config(spec, override), groups, rounds=1 if name == "plain" else 5)
    assert bulk.seconds == pytest.approx(exact.seconds, rel=allowed)
    assert bulk.generated[-1] == exact.generated[-1] == sum(g.sum() for g in groups)
    if name != "plain":
        assert bulk.accept_length == pytest.approx(exact.accept_length, rel=0.15)


def test_memory_pressure_preempts_in_both():
    config = sim_config(
        "rollout.kv_cache_mib=160", "rollout.speculation.drafter=none", "workload.prompt_tokens=64"
    )
    exact, bulk = both(config, groups_of(2, 4, 4, 400.0))
    assert exact.preemptions > 0
    assert bulk.preemptions > 0
    assert bulk.seconds == pytest.approx(exact.seconds, rel=0.2)


def test_nothing_is_drafted_above_the_threshold():
    config = sim_config("rollout.speculation.drafter=eagle", "plain_above=5")
    drafting = Decider(config, build_costs(config), 16).table(1.0).speculating
    assert not drafting[6:].any() and len(drafting) == 17
    assert (drafting[1:6] > 0.5).any()
