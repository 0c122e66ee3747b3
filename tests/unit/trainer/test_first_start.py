"""Where a first start takes long without another sign, a line says so before and one says the seconds after."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.actor.policy import MegatronPolicy
from megatron_tlt.models.decoders.native import build
from megatron_tlt.rollout.engine import Engine


def capture(device: str) -> None:
    runner = SimpleNamespace(pool=SimpleNamespace(capture=lambda rows, steps: None), device=torch.device(device))
    Engine.capture_graphs(SimpleNamespace(runner=runner, is_idle=True, speculator=None), 1)  # type: ignore[arg-type]


def update(has_compiled: bool) -> None:
    policy = SimpleNamespace(_has_compiled=has_compiled)
    with MegatronPolicy._first_update(policy):  # type: ignore[arg-type]
        pass
    assert policy._has_compiled


def test_long_silent_work_is_announced_the_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(build, "_compile", lambda compiler, options, target: target.touch())
    with caplog.at_level(logging.INFO, "megatron_tlt"):
        for device in ("cuda", "cpu"):
            capture(device)
        for has_compiled in (False, True):
            update(has_compiled)
        for _ in range(2):
            build.library_path.__wrapped__()
    said = [record.getMessage() for record in caplog.records]
    names = ("capturing CUDA graphs", "first update", "compiling the native decoder")
    for name, before, after in zip(names, said[::2], said[1::2], strict=True):
        assert before.startswith(f"{name}: ") and after.startswith(f"{name}: done in 0.")
