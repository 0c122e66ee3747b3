"""How the errors of a command's ranks become its exit code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.world import World
from megatron_tlt.errors import ConfigError, PromptError, UnjudgedError


@pytest.mark.parametrize(
    ("error", "is_accepted", "code", "outcome"),
    [
        (PromptError("p.jsonl:7: too long"), False, 2, "ended"),
        (PromptError("p.jsonl:7: too long"), True, 1, "failed"),
        (ConfigError.of("train.run_dir", "r", "must be empty"), False, 2, "ended"),
        (UnjudgedError("no response has a reward"), True, 1, "failed"),
    ],
)
def test_input_that_is_wrong_is_refused_before_a_run_and_fails_it_later(
    error: Exception,
    is_accepted: bool,
    code: int,
    outcome: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def body(world: World) -> None:
        raise error

    ends: list[tuple[Any, ...]] = []
    world = SimpleNamespace(
        local_rank=1,
        is_accepted=is_accepted,
        store=SimpleNamespace(add=lambda *_: 1),
        refuse=lambda *end: ends.append(end),
        leave_refused=ends.append,
    )
    monkeypatch.setattr(World, "start", lambda *_: world)
    assert run_on_every_rank(DistributedSection(), 1, body) == code
    assert (ends[0][0], ends[1]) == (outcome, code)
    assert str(error) in capsys.readouterr().err
