"""The files and directories that a configuration reads."""

from __future__ import annotations

from typing import Any

from megatron_tlt.config.base import places
from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import Config, SftConfig


def found(settings: dict[str, Any], root: type[Any] = Config) -> dict[str, str]:
    return {place.field: place.value for place in places(build_config(settings, (), root))}


def test_fields_of_files_are_found_where_they_are_read() -> None:
    settings: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": {"kind": "jsonl", "path": "rows"}}}
    assert found(settings) == {"model.path": "m", "data.train.path": "rows"}
    settings["model"] |= {"tokenizer": "t", "megatron_path": "g"}
    settings["data"]["eval"] = {"kind": "hf", "path": "a/rows"}
    settings |= {"actor": {"lora": {"adapter_path": "l"}}, "algorithm": {"name": "distill", "teacher": "b"}}
    settings |= {"rollout": {"speculation": {"drafter": "eagle", "drafter_path": "d"}}, "checkpoint": {"resume": "r"}}
    assert found(settings) == {
        "model.path": "m",
        "model.tokenizer": "t",
        "model.megatron_path": "g",
        "actor.lora.adapter_path": "l",
        "rollout.speculation.drafter_path": "d",
        "algorithm.teacher": "b",
        "data.train.path": "rows",
        "data.eval.path": "a/rows",
        "checkpoint.resume": "r",
    }
    settings["rollout"]["speculation"]["drafter"] = "suffix"
    settings["checkpoint"]["resume"] = "never"
    assert not found(settings).keys() & {"rollout.speculation.drafter_path", "checkpoint.resume"}


def test_records_of_fine_tuning_are_found() -> None:
    settings = {"model": {"path": "m"}, "sft": {"train_path": "a", "eval_path": "b", "out": "o"}}
    assert found(settings, SftConfig) == {"model.path": "m", "sft.train_path": "a", "sft.eval_path": "b"}
