"""The parts of a run as its configuration has them on each rank."""

from types import SimpleNamespace

import pytest

from megatron_tlt.config.load import build_config
from megatron_tlt.rewards.pool import RewardPool
from megatron_tlt.trainer import setup


@pytest.mark.parametrize(("rank", "is_first"), [(0, True), (1, False), (4, True), (7, False)])
def test_the_rank_that_judges_an_engine_s_responses_has_the_workers_of_all(monkeypatch, rank, is_first):
    started = []
    monkeypatch.setattr(RewardPool, "warm_up", lambda pool: started.append(pool._section.workers))
    config = build_config({"model": {"path": "m"}, "rollout": {"tp": 4}, "rewards": {"workers": 2}})
    setup.reward_pool(config, SimpleNamespace(rank=rank, size=8, heartbeat=lambda: None)).close()
    assert started == [8] * is_first
