"""A stopped training of a drafter goes on with the settings that it was begun with, and with no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import Config
from megatron_tlt.config.run import UNFINISHED
from megatron_tlt.drafters.state_file import drafter_state_writer
from megatron_tlt.errors import ConfigError
from megatron_tlt.trainer.drafter_training import _STATE, training_settings, unfinished_state

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
