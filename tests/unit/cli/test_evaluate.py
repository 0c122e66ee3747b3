"""What `eval` and `drafter` say of what they measure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from megatron_tlt.cli.drafter import _checked
from megatron_tlt.cli.evaluate import _cut_warning, _end_cache, _eval_on, _what
from megatron_tlt.config.checks.pre_rollouts import takes_drafts
from megatron_tlt.config.load import load_config
from tests.helpers.mpi import ROOT


@pytest.mark.parametrize(("overrides", "is_warned"), [([], False), (["model.megatron_path=runs/mg"], True)])
def test_weights_that_are_not_read_are_named(
    overrides: list[str], is_warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(ROOT / "configs/quickstart.yaml", overrides)
    said, repeated = _what(config, 4, 4), _what(config, 3, 4)
    assert "Prompts: 3 of data.eval (basic" in repeated and ") in 4 rows" in repeated and " rows" not in said
    assert "Prompts: 4 of data.eval (basic_arithmetic" in said and "\nRewards: task" in said
    drawn = "eval.samples_per_prompt = 1, eval.max_tokens = 448, eval.temperature = 1, eval.top_p = 1"
    assert f"\nResponses: {drawn}, rollout.dtype = fp32\n" in said
    form = "rewards.functions=[{name: task}, {name: format, pattern: x}]"
    assert "all of: task at least 1" in _what(load_config(ROOT / "configs/quickstart.yaml", [form]), 4, 4)
    monkeypatch.setattr("megatron_tlt.trainer.preflight.check_on", lambda *_: None)
    world: Any = SimpleNamespace(is_main=True)
    arguments: Any = SimpleNamespace(action="train", drafter=None)
    _checked(config, world, arguments, [])
    for text in (said, caplog.text):
        assert ("runs/mg is not read here: the weights are those of model.path = " in text) == is_warned


def test_responses_that_were_cut_are_a_warning_where_they_are_many() -> None:
    config = load_config(ROOT / "configs/quickstart.yaml", ["eval.max_tokens=300", "eval.top_k=20"])
    assert "eval.max_tokens = 300, eval.temperature = 1, eval.top_p = 1, eval.top_k = 20," in _what(config, 4, 4)
    assert "23.0% of the responses reached eval.max_tokens = 300 and" in str(_cut_warning(config, 0.23))
    assert _cut_warning(config, 0.01) is None


def test_an_evaluation_starts_an_engine_to_which_no_call_brings_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run the last evaluation's responses are, which cost it room."""
    options = ["eval.num_prompts=2", "data.chat_template_date=2026-01-01"]
    config, world = load_config(ROOT / "configs/quickstart.yaml", options), MagicMock(size=2, rank=0)
    engine = MagicMock(side_effect=InterruptedError)
    monkeypatch.setattr("megatron_tlt.trainer.preflight.check_on", lambda *_: None)
    monkeypatch.setattr("megatron_tlt.trainer.setup.reward_pool", lambda *_: None)
    monkeypatch.setattr("megatron_tlt.trainer.models.open_backend", engine)
    with pytest.raises(InterruptedError):
        _eval_on(config, world, None)
    assert takes_drafts(config, 2) and not takes_drafts(engine.call_args.args[0], 2)


@pytest.mark.parametrize(("failures", "keeps", "ends"), [(0, True, "clear"), (2, True, "close"), (2, False, "close")])
def test_responses_that_were_not_judged_are_kept(failures: int, keeps: bool, ends: str, capsys: Any) -> None:
    ended: list[str] = []
    calls = {name: lambda name=name: ended.append(name) for name in ("clear", "close")}
    cache: Any = SimpleNamespace(keeps=keeps, **calls)
    for is_main in (True, False):
        _end_cache(cache, failures, Path("o.json"), is_main)
    said = capsys.readouterr().err
    assert ended == [ends] * 2 and said.count("2 responses were not judged and count as wrong") == (failures > 0)
    again = "o.json.unfinished keeps the responses: the same command with --overwrite judges them again"
    assert (again in said) == (failures > 0 and keeps)
