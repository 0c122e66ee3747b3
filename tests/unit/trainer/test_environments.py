"""What the environments of a run add to prompts, over ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_tlt.config.env import EnvSection
from megatron_tlt.errors import ConfigError, EnvError, OpeningError
from megatron_tlt.trainer.environments import Environments, before_a_run
from megatron_tlt.types import Prompt

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
