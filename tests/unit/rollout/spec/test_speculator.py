"""When the drafters are told what was said, and whose time that is."""

from __future__ import annotations

import numpy as np

from megatron_tlt.distributed.tensor_parallel import SingleRank
from megatron_tlt.rollout.batch import StepResult
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.spec.coupled import coupled
from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.speculator import Speculator
from megatron_tlt.rollout.spec.verify import Accepted
from megatron_tlt.types import NO_DRAFT, DraftStrategy, SamplingParams
from tests.helpers.suffix_tables import make_request

CHAIN = DraftStrategy("slow", 2)


class World:
    """A clock, and a drafter and a selector that take their time by it."""

    kind = "slow"

    def __init__(self) -> None:
        self.now, self.follows = 0.0, 0
        self.strategy, self.resting = NO_DRAFT, 0
        self.rested: list[tuple[int, list[float]]] = []
        self.observed: list[tuple[str, float, float]] = []
        self.rows = RunningRows(4, 16, 4, 50)
        self.speculator = Speculator(
            self, self, coupled, self.rows, lambda nodes: nodes, SingleRank(), clock=lambda: self.now
        )
        request = make_request(0, [1, 2], [3])
        request.params = SamplingParams(max_tokens=40)
        self.rows.start(request, [0], 2, 2)

    def select(self, running: int) -> DraftStrategy:
        self.now += 1.0
        return self.strategy

    def rest(self, running: int) -> int:
        return self.resting

    def observe_rest(self, running: int, seconds: list[float]) -> None:
        self.rested.append((running, seconds))

    def admit(self, strategy, running, survival, depths, counts, parents) -> np.ndarray:
        return np.ones(len(survival), bool)

    def end_generate(self) -> None:
        pass

    def follow(self, rows: RunningRows, strategy: DraftStrategy) -> None:
        self.follows += 1
        self.now += 50.0

    def propose(self, rows: RunningRows, lengths: np.ndarray, strategy: DraftStrategy) -> Draft:
        self.now += 3.0
        ones = np.ones(1, np.int32)
        return Draft(ones, ones, np.ones(1, np.float32), ones)

    def observe(self, *told) -> None:
        if isinstance(told[0], DraftStrategy):
            self.observed.append((told[0].kind, *told[4:]))

    def step(self, strategy: DraftStrategy) -> None:
        self.strategy = strategy
        assert not self.speculator.rests()
        draft = self.speculator.plan()
        assert (draft is not None) == (strategy is CHAIN)
        self.now += 10.0
        one, yes = np.ones(1, np.int32), np.ones(1, bool)
        result, accepted = StepResult(one, np.zeros(1, np.float32)), None
        if draft is not None:
            accepted = Accepted(one, np.zeros(1, np.int32), yes, yes)
            result.counts = one
        self.speculator.told(draft, accepted, result, 10.0)

    def rest_one(self) -> bool:
        rests = self.speculator.rests()
        self.now += 7.0
        return rests


def test_nobody_follows_while_nobody_drafts() -> None:
    world = World()
    for _ in range(20):
        world.step(NO_DRAFT)
    assert world.follows == 0
    world.step(CHAIN)
    world.step(CHAIN)
    assert world.follows == 2


def test_what_was_missed_is_no_part_of_the_step_that_reads_it() -> None:
    """Behind plain steps; behind a drafted one following belongs to the draft."""
    world = World()
    for strategy in (NO_DRAFT, NO_DRAFT, CHAIN, CHAIN, NO_DRAFT, CHAIN):
        world.step(strategy)
    world.speculator._settle()
    assert world.observed == [
        ("none", 0.0, 11.0),
        ("none", 0.0, 11.0),
        ("slow", 3.0, 11.0),
        ("slow", 53.0, 11.0),
        ("none", 0.0, 11.0),
        ("slow", 3.0, 11.0),
    ]


def test_a_rest_is_not_planned_but_counted_and_timed() -> None:
    world = World()
    assert not world.speculator.rests()
    world.resting = 3
    world.step(NO_DRAFT)
    assert [world.rest_one() for _ in range(4)] == [True, True, True, False]
    assert world.observed == [("none", 0.0, 11.0)] and world.rested == [(1, [7.0] * 3)]
    assert world.speculator.take_stats().steps_by_strategy == {"none": 4}


def test_a_rest_goes_on_after_steps_of_another_regime() -> None:
    world = World()
    world.resting = 2
    world.step(NO_DRAFT)
    other = make_request(1, [1, 2], [3])
    other.params = SamplingParams(max_tokens=40)
    assert world.rest_one()
    world.rows.start(other, [1], 2, 2)
    assert not world.rest_one()
    world.rows.stop(other)
    assert [world.rest_one() for _ in range(2)] == [True, False]
    assert world.rested == [(1, [7.0])] * 2


def test_what_is_no_decoding_step_is_no_part_of_a_rest() -> None:
    world = World()
    world.resting = 5
    world.step(NO_DRAFT)
    for end in (world.speculator.pause, world.speculator.end_generate):
        assert world.rest_one() and world.rest_one()
        end()
        world.now += 1000.0
    assert world.rested == [(1, [7.0, 7.0])] * 2
