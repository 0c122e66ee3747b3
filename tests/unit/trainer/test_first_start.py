"""Where a first start takes long without another sign, a line says so before and one says the seconds after."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_tlt.actor.policy import MegatronPolicy
from megatron_tlt.backends.process import EngineProcess
from megatron_tlt.models.decoders.native import build
from megatron_tlt.rollout.engine import Engine


def capture(device: str) -> None:
    pool = SimpleNamespace(capture=lambda rows_each, steps: None)
    runner = SimpleNamespace(pool=pool, device=torch.device(device))
    Engine.capture_graphs(stand_in(runner=runner, is_idle=True, speculator=None), 1)


def update(has_compiled: bool) -> None:
    policy = stand_in(_has_compiled=has_compiled)
    with MegatronPolicy._first_update(policy):
        pass
    assert policy._has_compiled


def start_vllm() -> None:
    launch = SimpleNamespace(name="vLLM")
    EngineProcess.start(stand_in(launch=launch, _log=Path("/x.log"), call=lambda name, patience: None))


def build_native() -> None:
    build.library_path.__wrapped__()


def stand_in(**fields: Any) -> Any:
    return SimpleNamespace(**fields)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda: capture("cuda"), "capturing CUDA graphs"),
        (lambda: capture("cpu"), None),
        (lambda: update(has_compiled=False), "first update"),
        (lambda: update(has_compiled=True), None),
        (start_vllm, "starting vLLM"),
        (build_native, "compiling the native decoder"),
        (lambda: (build_native(), build_native()), "compiling the native decoder"),  # said once
    ],
)
def test_long_silent_work_is_announced(
    work: Callable[[], object], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(build, "_compile", lambda compiler, options, target: target.touch())
    with caplog.at_level(logging.INFO, "megatron_tlt"):
        work()
    messages = [record.getMessage() for record in caplog.records]
    if said is None:
        assert not messages
    else:
        before, after = messages
        assert before.startswith(f"{said}: ") and after.startswith(f"{said}: done in 0.")
