"""What a run that goes on has otherwise than at its last start."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import Config
from megatron_tlt.trainer.run_record import write_config


def start(run_dir: Path, *overrides: str) -> list[str]:
    """The fields that this start has otherwise than the one before."""
    config = build_config({"model": {"path": "m"}}, [f"train.run_dir={run_dir}", *overrides], Config)
    return sorted(write_config(config, run_dir))


def test_settings_that_changed_between_two_starts_are_named(tmp_path: Path) -> None:
    reward = "rewards.functions=[{name: python, path: r.py:f, threshold: %s}]"
    assert start(tmp_path, reward % 0.5) == []
    assert start(tmp_path, reward % 0.5, "train.num_steps=7") == []
    changed = start(tmp_path, reward % 0.9, "optimizer.lr=0.5", "train.num_steps=8")
    assert changed == ["optimizer.lr", "rewards.functions.0.threshold"]


def test_code_of_a_user_that_changed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "code"
    code.mkdir()
    reward, environment = code / "reward.py", "my_package.world:World"
    reward.write_text("from beside import score as reward")
    (code / "beside.py").write_text("def score(*four): return 1.0")
    options = f"rewards.functions=[{{name: python, path: '{reward}:reward'}}]", f"env.path={environment}"
    assert start(tmp_path, *options) == []
    assert start(tmp_path, *options) == []
    (code / "beside.py").write_text("def score(*four): return 0.5")
    assert start(tmp_path, *options) == [f"code.{reward}:reward (or a .py file beside it)"]

    def refuse(_: Path) -> bytes:
        raise PermissionError("of someone else")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert start(tmp_path, *options) == [], "a file beside it may not be read, and the run needs none"
