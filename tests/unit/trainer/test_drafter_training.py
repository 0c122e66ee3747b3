"""A stopped training of a drafter goes on with the settings that it was begun with, and with no others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_tlt.config.checks.files import output_directory_problems
from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import Config
from megatron_tlt.config.run import UNFINISHED
from megatron_tlt.drafters.state_file import drafter_state_writer
from megatron_tlt.errors import CheckpointError, ConfigError, RunDirectoryError
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.loader import iter_weights
from megatron_tlt.models.hf.writer import save_hf
from megatron_tlt.resilience.run_lock import RunLock
from megatron_tlt.trainer.drafter_training import (
    _STATE,
    DrafterJob,
    given_responses,
    read_settings,
    training_settings,
    unfinished_state,
)
from tests.helpers.disk import files_of_at_most
from tests.helpers.mpi import ROOT

BASE = {"model": {"path": "m"}, "rollout": {"speculation": {"drafter": "dspark"}}}


def stopped(out: Path, settings: dict[str, Any]) -> None:
    """Leaves the state of a training in `out`."""
    (out / UNFINISHED).mkdir()
    state = {"weights": {}, "training": {}, "steps": 3, "settings": settings}
    drafter_state_writer(state)(out / UNFINISHED / _STATE)


@pytest.mark.parametrize(
    "override",
    [
        "drafter.lr=0.5",
        "rollout.temperature=0.5",
        "rollout.dtype=bf16",
        "rollout.speculation.layers=[0,1,2]",
        "rollout.speculation.draft_vocab_size=50",
        "rollout.speculation.block_size=4",
        "rollout.speculation.block_layers=1",
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, override: str) -> None:
    settings, other = (
        training_settings(build_config(BASE, overrides, Config), None, 1) for overrides in ([], [override])
    )
    stopped(tmp_path, settings)
    assert (unfinished_state(tmp_path, settings) or {})["steps"] == 3
    with pytest.raises(ConfigError, match=f"unfinished training with {override.partition('=')[0]} = "):
        unfinished_state(tmp_path, other)


def test_other_rows_or_another_policy_in_the_same_files_are_refused_by_name(tmp_path: Path) -> None:
    model, file = tmp_path / "model", tmp_path / "responses.jsonl"
    shutil.copytree(ROOT / "assets/demo-policy", model)
    row = json.dumps({"prompt_token_ids": [5], "token_ids": [6, 7]}) + "\n"
    config = build_config(BASE, [f"model.path={model}", f"drafter.responses_path={file}"], Config)

    def settings() -> dict[str, str]:
        return read_settings(config, given_responses(config), [], [])

    file.write_text(row)
    stopped(tmp_path, settings())
    assert unfinished_state(tmp_path, settings())
    file.write_text(2 * row)
    with pytest.raises(ConfigError, match=r"unfinished training with rows of drafter\.responses_path = "):
        unfinished_state(tmp_path, settings())
    file.write_text(row)
    shape = ModelConfig.from_hf(model)
    weights = {name: tensor + 0.1 * ("o_proj" in name) for name, tensor in iter_weights(model, shape)}
    save_hf(model, shape, weights.items())
    with pytest.raises(ConfigError, match=r"unfinished training with weights of model\.path = "):
        unfinished_state(tmp_path, settings())


def test_a_second_training_does_not_touch_what_a_first_one_writes(tmp_path: Path) -> None:
    world: Any = SimpleNamespace(is_main=True, barrier=lambda: None, broadcast_object=lambda value: value)
    config, unused, unfinished = build_config(BASE, [], Config), Any, tmp_path / UNFINISHED
    unfinished.mkdir()
    (first := RunLock(unfinished)).acquire()
    with pytest.raises(RunDirectoryError, match=f"{unfinished} is in use by process"):
        DrafterJob(config, world, tmp_path, {}, unused, unused)
    first.release()


def test_a_finished_training_leaves_no_state_also_where_its_files_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next command would train from nothing and replace the drafter. NFS keeps the open lock under another name."""
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)
    job: Any = object.__new__(DrafterJob)
    job._out, job.world = tmp_path, SimpleNamespace(is_main=True, barrier=lambda: None)
    job._training = SimpleNamespace(save=lambda out: None, result=SimpleNamespace(bases=0))
    job.state_dir.mkdir()
    job.finish()
    assert output_directory_problems("--out", str(tmp_path), "drafter train", (), replaces=False)
    assert not (tmp_path / UNFINISHED).exists()


def test_a_state_that_does_not_fit_on_the_disk_leaves_nothing_there(tmp_path: Path) -> None:
    job: Any = object.__new__(DrafterJob)
    job._out, job.world, job._settings = tmp_path, SimpleNamespace(is_main=True), {}
    job._training = SimpleNamespace(state_dict=lambda: {"weights": {"w": torch.zeros(9_000)}})
    job.state_dir.mkdir()
    with files_of_at_most(10_000), pytest.raises(CheckpointError, match=rf"{_STATE} cannot be written: "):
        job.save()
    assert list(job.state_dir.iterdir()) == []
    job.save()
    assert [file.name for file in job.state_dir.iterdir()] == [_STATE]
