"""Problems of inputs are found together with those of the layout."""

import pytest

from megatron_tlt.config.root import Config
from megatron_tlt.errors import ConfigError
from megatron_tlt.preflight import check_report, input_problems, missing_files

ARCHITECTURE = {
    "family": "qwen3",
    "vocab_size": 288,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
}


def make(**sections) -> Config:
    model = {"path": "not/here", "architecture": ARCHITECTURE}
    tree = {"model": model, "data": {"train": {"tasks": [{"name": "chain_sum"}]}}}
    return Config.model_validate({**tree, **sections})


def test_a_sound_config_reports_without_its_files():
    report = check_report(make(), 4)
    assert "Ranks: 4" in report
    assert report.endswith("warning: not on this machine: model.path = not/here")


def test_tasks_rewards_and_layout_are_wrong_at_once():
    config = make(
        actor={"tp": 3},
        data={"train": {"tasks": [{"name": "chain_sums"}, {"name": "chain_sum", "params": {"min_term": 1}}]}},
        rewards={"functions": [{"name": "python", "path": "no_such_module:f"}]},
    )
    with pytest.raises(ConfigError) as caught:
        check_report(config, 4)
    paths = {problem.path.split("[")[0] for problem in caught.value.problems}
    assert {"data.train.tasks.0.name", "rewards.functions"} <= paths
    assert any(path.startswith("data.train.tasks.1") for path in paths)
    assert any("actor.tp" in path for path in paths)


def test_missing_files_are_named_by_their_fields():
    source = {"kind": "jsonl", "path": "no/prompts.jsonl"}
    config = make(data={"train": source, "eval": {**source, "path": "no/held-out.jsonl"}})
    assert [p.path for p in missing_files(config)] == ["model.path", "data.train.path", "data.eval.path"]
    assert input_problems(config) == []
