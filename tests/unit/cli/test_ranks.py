"""How the errors of a command's ranks become its exit code, and what they say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.config.data import DataSection, PromptSourceConfig
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.data.prompts import held_out_prompts
from megatron_tlt.distributed.world import World
from megatron_tlt.errors import ConfigError, PromptError, UnjudgedError

pytestmark = pytest.mark.usefixtures("package_logger")


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
        rank=1,
        size=2,
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


@pytest.mark.parametrize("rank", [0, 1])
def test_what_every_rank_finds_at_the_start_is_said_once(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the first rank of any command, also before a run begins."""
    (tmp_path / "h.jsonl").write_text('{"prompt": "a"}\n')
    source = PromptSourceConfig(kind="jsonl", path=str(tmp_path / "h.jsonl"))
    tokenizer: Any = SimpleNamespace(has_chat_template=False, encode_prompt=lambda text: [1])
    world = SimpleNamespace(
        rank=rank,
        size=2,
        local_rank=1,
        is_main=rank == 0,
        where="phase eval",
        enter=lambda phase: None,
        close=lambda: None,
    )
    monkeypatch.setattr(World, "start", lambda *_: world)
    found: list[int] = []

    def body(world: World) -> None:
        found.append(len(held_out_prompts(DataSection(train=source, eval=source), tokenizer, 8)))

    assert run_on_every_rank(DistributedSection(), 1, body) == 0 and found == [1]
    said = capsys.readouterr().err
    assert said.count("rank 0/2 phase eval | INFO ") == said.count("only 1 prompts left of 8 requested") == (rank == 0)
