"""Recommendations, from points whose rates are made up."""

from dataclasses import replace

import pytest

from megatron_tlt.sim.modes import simulate
from megatron_tlt.sim.result import Strategy
from megatron_tlt.sim.thresholds import recommend
from tests.helpers.sim import sim_config

NAME = "running requests of a replica up to which drafts pay"
NODES = "nodes"


def config_of(*overrides):
    return sim_config("rollout.speculation.drafter=eagle", "rollout.speculation.drafter_path=x", *overrides)


@pytest.fixture(scope="module")
def point():
    small = ("workload.prompts_per_step=8", "rollout.speculation.selector=fixed")
    return simulate(config_of(*small), ["tlt"]).points[0]


def advice(*points):
    return {t.setting: t for t in recommend(points)}


def with_gains(point, gains):
    rows = [Strategy(n, {f"arm{n}": 0.9, "none": 0.1}, 100 * gain, 100, 3.0) for n, gain in gains.items()]
    return replace(point, strategies=rows)


def test_drafts_pay_up_to_the_end_of_the_first_run_of_gains(point):
    mixed = with_gains(point, {1: 2.0, 2: 1.5, 4: 1.0, 8: 1.4})
    assert advice(mixed)[NAME].value == "2"
    assert advice(with_gains(point, {1: 2.0, 2: 1.5}))[NAME].value == "2 or more"
    assert advice(with_gains(point, {1: 1.0, 2: 1.5}))[NAME].value == "none"


def test_nodes_end_where_they_pay_no_more(point):
    def of(*seconds):
        return [replace(point, nodes=2**i, seconds=s) for i, s in enumerate(seconds)]

    paying = advice(*of(100, 55, 30))[NODES]
    assert (paying.value, paying.reason[:21]) == ("4", "the largest simulated")
    ended = advice(*of(100, 55, 50))[NODES]
    assert ended.value == "2" and "less than half" in ended.reason
