"""The bank of one rank, over an engine that draws by key: reuse, staleness, agreement, removal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_tlt.config.rollout_cache import RolloutCacheSection
from megatron_tlt.models.keys import row_key
from megatron_tlt.resilience.rollout_cache import NoRolloutCache, Rollout, RolloutCache
from megatron_tlt.types import Prompt, Sample, SamplingParams

PROMPTS = [Prompt(i, f"q{i}", (1, 2, i), "?") for i in range(3)]
PLAN = Rollout(SamplingParams(seed=3), 4)
ALL = {(p, i) for p in range(3) for i in range(4)}


class World:
    """Rank `rank` of `size`; the others say in a gather what this one says, or what `others` makes of it."""

    def __init__(self, rank: int = 0, size: int = 1, others: Callable[[Any], Any] = lambda value: value):
        self.rank, self.size, self._others = rank, size, others

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Nobody to wait for."""

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value if rank == self.rank else self._others(value) for rank in range(self.size)]


class Engine:
    """Answers are a function of the keys; `asked` is what had to be made."""

    def __init__(self, dies_after: int | None = None):
        self.asked: set[tuple[int, int]] = set()
        self._dies_after = dies_after

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        num_samples: int,
        on_progress: Any = None,
        have: Iterable[tuple[int, int]] = (),
        on_answer: Any = None,
    ) -> list[Sample]:
        made = []
        for prompt, index in ((p, i) for p in prompts for i in range(num_samples)):
            if (prompt.prompt_id, index) in have:
                continue
            if len(made) == self._dies_after:
                raise KeyboardInterrupt
            tokens = [row_key(params.seed, prompt.prompt_id, index, t) % 1000 for t in range(3)]
            made.append(Sample(prompt.prompt_id, index, tokens, [-0.5] * 3, "t", "stop", 0))
            on_answer(made[-1])
        self.asked = {(s.prompt_id, s.sample_index) for s in made}
        return made


def run_step(
    run_dir: Path,
    engine: Engine,
    *,
    weight: float = 1.0,
    seed: int = 3,
    world: World | None = None,
    tp: int = 1,
    step: int = 1,
    prompts: list[Prompt] = PROMPTS,
    fresh: bool = False,
) -> tuple[list[Sample], dict[str, float]]:
    """One process: starts after step - 1 steps, pushes weights, answers, is ended."""
    bank = RolloutCache(
        RolloutCacheSection(),
        run_dir,
        world or World(),  # type: ignore[arg-type]
        engine,
        PLAN,
        identity={"seed": seed},
        tp=tp,
        fresh=fresh,
    )
    bank.start(step - 1)
    list(bank.watch([("w", torch.full((4,), weight))]))
    bank.begin_step(step, step - 1)
    try:
        samples = bank.generate(prompts, None)  # type: ignore[arg-type]
    finally:
        figures = bank.end_step()
        bank.close()
    return samples, figures


def died(run_dir: Path, after: int, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_step(run_dir, Engine(after), **options)


def test_only_what_is_missing_is_made_and_all_of_it_is_returned(tmp_path: Path) -> None:
    whole, _ = run_step(tmp_path / "whole", Engine())
    died(tmp_path, 5)
    engine = Engine()
    samples, figures = run_step(tmp_path, engine)
    assert samples == whole
    assert len(engine.asked) == 7
    assert figures == {"rollout/banked": 5.0, "rollout/bank_disabled": 0.0}
    again = Engine()
    assert run_step(tmp_path, again)[0] == whole
    assert again.asked == set()  # of two attempts together


@pytest.mark.parametrize(
    "change",
    [{"weight": 1.5}, {"seed": 4}, {"step": 2}, {"prompts": [Prompt(i, "o", (5, i), "?") for i in range(3)]}],
)
def test_a_stale_bank_is_not_used(tmp_path: Path, change: dict[str, Any]) -> None:
    died(tmp_path, 5)
    engine = Engine()
    _, figures = run_step(tmp_path, engine, **change)
    assert engine.asked == ALL
    assert figures["rollout/banked"] == 0.0


def test_a_fresh_start_empties_it(tmp_path: Path) -> None:
    died(tmp_path, 5)
    engine = Engine()
    run_step(tmp_path, engine, fresh=True)
    assert engine.asked == ALL


def reopened(run_dir: Path) -> RolloutCache:
    """The bank of one rank's next start."""
    return RolloutCache(
        RolloutCacheSection(),
        run_dir,
        World(),  # type: ignore[arg-type]
        Engine(),
        PLAN,
        identity={},
        tp=1,
        fresh=False,
    )


def test_covered_steps_go_at_the_start_and_on_the_way(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        died(tmp_path, 2, step=1)
        (tmp_path / "bank/step-000001").rename(tmp_path / f"bank/step-00000{step}_")
    for path in (tmp_path / "bank").iterdir():
        path.rename(path.with_name(path.name[:-1]))
    bank = reopened(tmp_path)
    left = lambda: sorted(path.name for path in (tmp_path / "bank").iterdir())  # noqa: E731
    bank.start(1)
    assert left() == ["step-000002", "step-000003", "step-000004"]
    bank.covered_by(None)
    bank.covered_by(3)
    bank.close()
    assert left() == ["step-000004"]
    bank = reopened(tmp_path)
    bank.finish()
    bank.close()
    assert not (tmp_path / "bank").exists()


def test_ranks_of_one_engine_that_read_differently_use_nothing(tmp_path: Path) -> None:
    died(tmp_path, 5)

    def other(value: Any) -> Any:
        """The other rank of this replica has read nothing."""
        return (value[0], 0, 0, False) if isinstance(value, tuple) else value

    engine = Engine()
    world = World(0, 2, other)
    list_of_two = [("w", torch.ones(4))]
    bank = RolloutCache(
        RolloutCacheSection(),
        tmp_path,
        world,
        engine,
        PLAN,
        identity={"seed": 3},
        tp=2,
        fresh=False,  # type: ignore[arg-type]
    )
    bank.start(0)
    list(bank.watch(list_of_two))
    bank._fingerprint.take = _fingerprint_of_one  # type: ignore[method-assign]
    bank.begin_step(1, 0)
    bank.generate(PROMPTS, None)  # type: ignore[arg-type]
    bank.close()
    assert engine.asked == ALL


def _fingerprint_of_one() -> str:
    from megatron_tlt.sync.fingerprint import WeightFingerprint

    print_of = WeightFingerprint(World())  # type: ignore[arg-type]
    list(print_of.watch([("w", torch.ones(4))]))
    return print_of.take()


def test_no_bank_hands_everything_to_the_backend(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Any] = []

    class Backend:
        def generate(self, *arguments: Any) -> list[Sample]:
            calls.append(arguments)
            return []

    with caplog.at_level("INFO"):
        bank = NoRolloutCache(Backend(), PLAN, "it draws without keys")  # type: ignore[arg-type]
        NoRolloutCache(Backend(), PLAN)  # type: ignore[arg-type]
    assert caplog.text.count("no rollout bank") == 1 and "without keys" in caplog.text
    assert bank.generate(PROMPTS, None) == []  # type: ignore[arg-type]
    assert calls == [(PROMPTS, PLAN.params, 4, None)]
    assert bank.end_step() == {}
