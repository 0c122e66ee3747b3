"""Where pre-rollouts run, where evaluations draft, and the reasons elsewhere."""

from typing import Any

import pytest

from megatron_tlt.config.checks.pre_rollouts import check_pre_rollouts, why_no_eval_drafts, why_no_pre_rollouts
from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import Config

ENV = {"env": {"kind": "calculator"}}
STATIC = {"rollout": {"schedule": "static"}}


def config_of(more: dict[str, Any], choice: Any = "auto") -> Config:
    config = build_config({"model": {"path": "m"}, "idle": {"pre_rollout": choice}, **more})
    assert isinstance(config, Config)
    return config


def test_they_run_by_default_in_the_embedded_engine_and_vllm_with_two_replicas():
    assert why_no_pre_rollouts(config_of({}), 2) is None
    assert why_no_pre_rollouts(config_of({"rollout": {"backend": "vllm"}}), 2) is None
    assert why_no_pre_rollouts(config_of({"rollout": {"release_cache": True}}), 2) is None
    assert why_no_pre_rollouts(config_of(ENV), 2) is None and not list(check_pre_rollouts(config_of(ENV, True)))
    assert "one rollout replica" in str(why_no_pre_rollouts(config_of({}), 1))
    assert "one rollout replica" in str(why_no_pre_rollouts(config_of({"rollout": {"tp": 2}}), 2))
    assert why_no_pre_rollouts(config_of({}, False), 2) == "idle.pre_rollout: false"
    assert not list(check_pre_rollouts(config_of({}, True)))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"rollout": {"backend": "trtllm"}}, "rollout.backend: trtllm"),
        ({"actor": {"router_replay": "rollout"}}, "actor.router_replay: rollout"),
    ],
)
def test_where_they_cannot_run_they_are_off_by_name_and_true_is_refused(more: dict[str, Any], named: str):
    assert named in str(why_no_pre_rollouts(config_of(more), 2))
    assert not list(check_pre_rollouts(config_of(more))) and not list(check_pre_rollouts(config_of(more, False)))
    (problem,) = check_pre_rollouts(config_of(more, True))
    assert (problem.path, problem.value) == ("idle.pre_rollout", True) and named in problem.allowed


def test_a_run_that_repeats_bit_by_bit_without_drafts_gets_them_only_where_they_are_asked_for():
    assert "rollout.schedule: static" in str(why_no_pre_rollouts(config_of(STATIC), 2))
    for exact in ({"speculation": {"drafter": "suffix"}}, {"numerics": "invariant"}):
        assert why_no_pre_rollouts(config_of({"rollout": {"schedule": "static", **exact}}), 2) is None
    asked = config_of(STATIC, True)
    assert why_no_pre_rollouts(asked, 2) is None and not list(check_pre_rollouts(asked))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({}, None),
        ({"idle": {"pre_rollout": False}}, "idle.pre_rollout: false"),
        ({"rollout": {"release_cache": True}}, None),
        (ENV, None),
        ({"data": {}}, "the run has no evaluations"),
        ({"eval": {"every": 0}}, "the run has no evaluations"),
        ({"rollout": {"backend": "vllm"}}, None),
        ({"rollout": {"backend": "trtllm"}}, "rollout.backend: trtllm"),
        (STATIC, "rollout.schedule: static"),
        ({"rollout": {"schedule": "static", "numerics": "invariant"}}, None),
    ],
)
def test_evaluations_draft_on_one_rank_too(more: dict[str, Any], named: str | None):
    config = config_of({"data": {"eval": {"kind": "jsonl", "path": "p"}}, **more})
    reason = why_no_eval_drafts(config)
    assert reason is None if named is None else named in str(reason)
