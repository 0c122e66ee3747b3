"""A stopped training of a drafter goes on with the settings that it was begun with, and with no others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import Config
from megatron_tlt.config.run import UNFINISHED
from megatron_tlt.drafters.state_file import drafter_state_writer
from megatron_tlt.errors import ConfigError, RunDirectoryError
from megatron_tlt.resilience.run_lock import RunLock
from megatron_tlt.trainer.drafter_training import _STATE, DrafterJob, training_settings, unfinished_state

BASE = {"model": {"path": "m"}, "rollout": {"speculation": {"drafter": "dspark"}}}


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
    (tmp_path / UNFINISHED).mkdir()
    state = {"weights": {}, "training": {}, "steps": 3, "settings": settings}
    drafter_state_writer(state)(tmp_path / UNFINISHED / _STATE)
    assert (unfinished_state(tmp_path, settings) or {})["steps"] == 3
    with pytest.raises(ConfigError, match=f"unfinished training with {override.partition('=')[0]} = "):
        unfinished_state(tmp_path, other)


def test_a_second_training_does_not_touch_what_a_first_one_writes(tmp_path: Path) -> None:
    world: Any = SimpleNamespace(is_main=True, barrier=lambda: None, broadcast_object=lambda value: value)
    config, unused, unfinished = build_config(BASE, [], Config), Any, tmp_path / UNFINISHED
    unfinished.mkdir()
    (first := RunLock(unfinished)).acquire()
    with pytest.raises(RunDirectoryError, match=f"{unfinished} is in use by process"):
        DrafterJob(config, world, tmp_path, {}, unused, unused)
    first.release()
