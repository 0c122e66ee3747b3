"""One date a run: config.json of the run that goes on has it."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import Config, SftConfig, TrainingConfig
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.trainer.chat_settings import template_settings, with_date
from megatron_tlt.trainer.run_record import write_config

FIRST = date(2026, 1, 2)


def run(run_dir: Path, *overrides: str) -> Config:
    return build_config({"model": {"path": "m"}}, [f"train.run_dir={run_dir}", *overrides], Config)


def day(config: TrainingConfig, unfinished: Path | None = None) -> date | None:
    return template_settings(with_date(config, SingleProcess(), unfinished)).day


def test_a_run_that_goes_on_keeps_its_first_day(tmp_path: Path) -> None:
    assert day(run(tmp_path)) == date.today()
    write_config(run(tmp_path, f"data.chat_template_date={FIRST}"), tmp_path, None, "x86_64")
    assert day(run(tmp_path)) == FIRST
    assert day(run(tmp_path, "data.chat_template_date=2025-03-04")) == date(2025, 3, 4)
    assert day(run(tmp_path, "checkpoint.resume=never")) == date.today()
    elsewhere = run(tmp_path / "new", f"checkpoint.resume={tmp_path / 'checkpoints/step-000001'}")
    assert day(elsewhere) == FIRST
    assert day(run(tmp_path / "new"), tmp_path) == FIRST, "a training in OUT/unfinished"


@pytest.mark.parametrize("text", ["{", "[]", '{"data": {}}', '{"data": {"chat_template_date": null}}'])
def test_a_record_without_a_day_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert day(run(tmp_path)) == date.today()


def test_fine_tuning_goes_on_with_its_first_day(tmp_path: Path) -> None:
    tree = {"model": {"path": "m"}, "sft": {"train_path": "t", "out": str(tmp_path)}}
    (tmp_path / "unfinished").mkdir()
    write_config(
        build_config(tree, [f"sft.chat_template_date={FIRST}"], SftConfig), tmp_path / "unfinished", None, "x86_64"
    )
    assert day(build_config(tree, ["sft.chat_template_kwargs.a='2026-05-06'"], SftConfig)) == FIRST
