"""What the environments of a run add to prompts, over ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_tlt.config.env import EnvSection
from megatron_tlt.config.root import Config
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.errors import ConfigError, EnvError, OpeningError
from megatron_tlt.trainer import environments as environments_module
from megatron_tlt.trainer.environments import Environments, before_a_run, open_environments
from megatron_tlt.types import Prompt
from tests.helpers.chat_models import DEMO_POLICY, chat_model

PROMPTS = [Prompt(i, f"d:{i}", (), str(i)) for i in range(5)]


def environments(rank: int, parts: list[object], tp: int = 1) -> Environments:
    """Of one of two ranks, whose pool gives prompts back as texts; `parts` gets what the ranks exchange."""

    def openings(prompts: list[Prompt]) -> list[str]:
        if any(p.text == "bad" for p in prompts):
            raise EnvError("no opening")
        return [p.text for p in prompts]

    made = Environments.__new__(Environments)
    made._pool = SimpleNamespace(openings=openings)  # type: ignore[assignment]

    def all_gather_object(value: object) -> list[object]:
        parts[rank] = value
        return parts

    made._world = SimpleNamespace(  # type: ignore[assignment]
        rank=rank, size=len(parts), all_gather_object=all_gather_object, wait_for_all=lambda: None
    )
    made._tp = tp
    return made


def test_each_rank_resets_a_part_of_the_prompts_and_all_raise_together() -> None:
    parts: list[object] = [[], ["1", "3"]]
    assert environments(0, parts)._openings(PROMPTS) == ["0", "1", "2", "3", "4"]
    assert environments(1, parts)._openings(PROMPTS) == ["0", "1", "2", "3", "4"]
    bad = [*PROMPTS[:3], Prompt(3, "d:3", (), "bad")]
    parts[0] = ["0", "2"]
    for rank in (1, 0):
        with pytest.raises(OpeningError, match="no opening"):
            environments(rank, parts)._openings(bad)


def test_the_first_rank_of_an_engine_resets_for_all_of_its_ranks() -> None:
    expected: list[object] = [["0", "2", "4"], [], ["1", "3"], []]
    parts = list(expected)
    for rank in (3, 2, 1, 0):
        found = environments(rank, parts, tp=2)._openings(PROMPTS)
    assert parts == expected and found == ["0", "1", "2", "3", "4"]


def test_before_a_run_a_failed_opening_names_the_environment() -> None:
    parts: list[object] = [[], []]
    for section, name in (({"path": "e.py:E"}, "env.path = 'e.py:E'"), ({"kind": "retry"}, "env.kind = 'retry'")):
        with pytest.raises(ConfigError, match=f"{name}: fails: no opening"), before_a_run(EnvSection(**section)):  # type: ignore[arg-type]
            environments(0, parts)._openings([Prompt(0, "d:0", (), "bad")])


def test_what_ends_a_turn_and_how_much_of_an_opening_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that are cut at their beginning need an opening's end."""
    monkeypatch.setattr(environments_module, "Environments", lambda *args, **named: named)
    model = chat_model(tmp_path / "m", None)
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    sections = {"model": {"path": str(model)}, "env": {"kind": "number_guess"}}
    for long_prompts, longest in ("drop", 64), ("cut_left", None):
        data = {"train": {"kind": "env"}, "max_prompt_tokens": 64, "long_prompts": long_prompts}
        tree = {**sections, "data": data, "rollout": {"stop": ["<|pad|>", "</answer>"]}}
        found: Any = open_environments(Config.model_validate(tree), HFTokenizer(DEMO_POLICY), SingleProcess())
        assert found["max_prompt_tokens"] == longest
        assert found["ends"] == [0, 2, 5] and found["stop"] == ("<|pad|>", "</answer>")
