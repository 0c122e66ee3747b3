"""What the selector learns of each step, and when drafters read new tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.rollout.batch import Batch, StepResult
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.speculation.bandit import BucketedEpsilonGreedy
from megatron_tlt.rollout.speculation.cost_model_selector import CostModelSelector
from megatron_tlt.rollout.speculation.pre_rollouts import PreRolledDrafter
from megatron_tlt.rollout.speculation.selector import FixedSelector, StrategySelector
from megatron_tlt.rollout.speculation.speculator import Speculator
from megatron_tlt.rollout.speculation.verify import Accepted
from megatron_tlt.types import NO_DRAFT, DraftStrategy, SamplingParams, StepMeasurement
from tests.helpers.suffix_tables import make_request

CHAIN = DraftStrategy("slow", 3)


class World:
    """A clock, and a drafter and a selector that take their time by it."""

    kind = "slow"

    def __init__(self, reserve: Callable[[np.ndarray], np.ndarray] = lambda lengths: lengths) -> None:
        self.now, self.syncs, self.clock_runs = 0.0, 0, True
        self.strategy = NO_DRAFT
        self.recorded: list[StepMeasurement] = []
        self.rows = RunningRows(4, 16, 4, 50, max_output=64)
        parts = self, self, self.rows, reserve, TensorParallel(), PreRolledDrafter(self.rows, 16, None)
        self.speculator = Speculator(*parts, clock=lambda: self.now if self.clock_runs else 0.0)
        request = make_request(0, [1, 2], [3])
        request.params = SamplingParams(max_tokens=40)
        self.rows.start(request, [0], 2, 2)

    def select(self, num_running: int) -> DraftStrategy:
        self.now += 1.0
        return self.strategy

    def record(self, measurement: StepMeasurement) -> None:
        self.recorded.append(measurement)

    def sync_context(self, rows: RunningRows) -> None:
        self.syncs += 1
        self.now += 50.0

    def propose(self, rows: RunningRows, lengths: np.ndarray, strategy: DraftStrategy) -> Draft:
        self.now += 3.0
        two = np.arange(1, 3, dtype=np.int32)
        return Draft(np.array([2], np.int32), two, np.array([0.9, 0.8], np.float32), two)

    def observe(self, draft: Draft, reached: np.ndarray, accepted: np.ndarray) -> None:
        pass

    def step(self, strategy: DraftStrategy) -> None:
        self.strategy = strategy
        batch = Batch(1)
        draft = self.speculator.propose(batch)
        assert (draft is not None) == (strategy is CHAIN)
        self.now += 10.0
        result = StepResult(np.ones(1, np.int32), np.zeros(1, np.float32))
        if draft is not None:  # of two tokens the first is emitted
            two = np.ones(2, np.int32)
            is_emitted = np.array([True, False])
            accepted = Accepted(np.array([2], np.int32), np.arange(2, dtype=np.int32), is_emitted, two > 0)
            result = StepResult(two, np.zeros(2, np.float32), accepted.counts, accepted)
        self.speculator.record(batch, draft, result)


def test_drafters_read_nothing_while_steps_are_plain() -> None:
    world = World()
    for _ in range(20):
        world.step(NO_DRAFT)
    assert world.syncs == 0
    world.step(CHAIN)
    world.step(CHAIN)
    assert world.syncs == 2


def test_every_decoding_step_is_measured() -> None:
    """What a drafter missed during plain steps is read outside of the measured seconds; what a draft added is not."""
    world = World()
    for strategy in (NO_DRAFT, CHAIN, CHAIN, NO_DRAFT, CHAIN):
        world.step(strategy)
    seconds = [(m.strategy, m.draft_seconds, m.step_seconds) for m in world.recorded]
    assert seconds == [
        (NO_DRAFT, 0.0, 10.0),
        (CHAIN, 3.0, 10.0),
        (CHAIN, 53.0, 10.0),
        (NO_DRAFT, 0.0, 10.0),
        (CHAIN, 3.0, 10.0),
    ]
    plain, drafted = world.recorded[:2]
    assert (plain.num_running, plain.num_rows, plain.num_emitted, plain.longest) == (1, 1, 1, 0)
    assert (drafted.num_running, drafted.num_rows, drafted.num_emitted) == (1, 3, 2)
    assert drafted.longest == 3 and drafted.accepted.tolist() == [1, 0, 0]


def test_a_drafter_is_not_asked_where_every_row_has_a_pre_rolled_draft() -> None:
    world = World()
    world.speculator.selector = FixedSelector(CHAIN)
    world.speculator.begin({(0, 0): np.arange(3, 30, dtype=np.int32)})
    world.speculator.pre_rollouts.start(world.rows.requests[0])
    draft = world.speculator.propose(Batch(1))
    assert draft is not None and draft.tokens.tolist() == list(range(4, 19))
    assert world.syncs == 0


def test_a_step_without_room_for_whole_drafts_says_how_long_they_could_be() -> None:
    """Longer ones would count as rejected."""
    world = World()
    world.speculator.pre_rollouts.most_rows = 3
    world.step(CHAIN)
    assert [m.longest for m in world.recorded] == [2]


def test_a_step_without_blocks_for_whole_drafts_says_how_long_they_could_be() -> None:
    world = World(reserve=lambda lengths: np.minimum(lengths, 1))
    world.step(CHAIN)
    assert [m.longest for m in world.recorded] == [1]


@pytest.mark.parametrize(
    "selector",
    [CostModelSelector("suffix", 3), BucketedEpsilonGreedy([NO_DRAFT, DraftStrategy("suffix", 3)], [1], 0.1)],
)
def test_steps_in_which_the_clock_has_not_moved_are_measured(selector: StrategySelector) -> None:
    """That of a thread may be coarse."""
    world = World()
    world.clock_runs = False
    for strategy in (NO_DRAFT, CHAIN):
        world.step(strategy)
    for _ in range(100):
        drafts = selector.select(1).draft_len > 0
        selector.record(replace(world.recorded[drafts], strategy=selector.select(1)))
