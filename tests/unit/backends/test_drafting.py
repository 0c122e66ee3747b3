"""What the selector learns of vLLM's steps, and what it decides."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mode
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_tlt.backends.drafting import StepDrafting
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.rollout.speculation.pre_rollouts import Choice
from megatron_tlt.rollout.speculation.step_costs import Expected
from megatron_tlt.types import NO_DRAFT, DraftStrategy

PLAIN_S, ROW_S, DRAFT_S = 10.0, 0.8, 0.2  # seconds of a step, of each row beyond eight, of drafting a token
LENGTH, LIKELY = 4, 0.9
NO_DRAFTS = torch.zeros(0, 0)
BUDGET = 2048  # tokens of a step


class Engine:
    """vLLM's order of calls around a `StepDrafting`, under a clock of its own."""

    def __init__(self, selector: str) -> None:
        section = SpeculationSection(drafter="eagle", selector=selector, draft_len=LENGTH)
        self.now = 0.0
        self.drafting = StepDrafting(section, torch.device("cpu"), BUDGET, clock=lambda: self.now)
        self.random = np.random.default_rng(0)
        self.drafted = 0  # tokens of each row, for the next step

    def step(self, rows: int, prompts: int = 0) -> int:
        """A step of `rows` requests, with so many prompts beside them; tokens drafted for each row of the next."""
        drafted = np.full(rows, self.drafted)
        right = self.random.random((rows, max(1, self.drafted))) < LIKELY
        accepted = right.cumprod(axis=1).sum(axis=1) if self.drafted else drafted
        fed = rows * (1 + self.drafted) + 30 * prompts
        self.now += PLAIN_S + ROW_S * max(0, fed - 8)
        chunk = np.zeros(rows_of_chunks := min(prompts, 1), int)  # the first prompt goes on in the next step
        is_drawn = np.arange(rows + rows_of_chunks) < rows
        self.drafting.record(np.append(drafted, chunk), np.append(accepted, chunk), is_drawn, not prompts)
        self.drafted = self.drafting.begin()
        self.now += DRAFT_S * self.drafted + 100.0 * prompts
        self.drafting.end(NO_DRAFTS)
        return self.drafted


def test_many_running_requests_draft_less_than_few() -> None:
    engine = Engine("cost_model")
    lengths = [mode(engine.step(rows) for _ in range(300)) for rows in (64, 1, 64)]
    assert lengths == [0, LENGTH, 0]


def test_steps_are_counted_and_those_with_prompts_not_measured() -> None:
    engine, seen = Engine("fixed"), []
    engine.drafting._selector.record = seen.append  # type: ignore[method-assign]
    for rows, prompts in ((2, 1), (3, 0), (3, 0), (3, 1), (4, 0), (4, 0)):
        engine.step(rows, prompts)
    assert [m.num_running for m in seen] == [3, 4], "not the first behind a prompt: its drafts were slow"
    for m in seen:
        assert m.num_rows == m.num_running * (1 + LENGTH)
        assert m.draft_seconds == pytest.approx(DRAFT_S * LENGTH)
        assert m.step_seconds == pytest.approx(PLAIN_S + ROW_S * (m.num_rows - 8))
        assert m.longest == LENGTH
        assert m.num_emitted == m.num_running + m.accepted.sum()
    stats = engine.drafting.take_stats()
    assert stats["steps_by_strategy"] == {f"trained_{LENGTH}": 5}
    assert stats["drafted_at"] == [17] * LENGTH
    assert stats["row_steps"] == 17, "without those in the middle of their prompts"
    assert stats["emitted_tokens"] == stats["row_steps"] + sum(stats["accepted_at"])


@pytest.mark.parametrize("selector", ["cost_model", "beg_mab"])
def test_steps_in_which_the_clock_has_not_moved_are_measured(selector: str) -> None:
    """That of a thread may be coarse."""
    engine = Engine(selector)
    engine.drafting._clock = lambda: 0.0
    for _ in range(100):
        engine.step(1)


class Device:
    """A GPU's queue: work ends when it is waited for, or when the host has read a step's tokens."""

    def __init__(self) -> None:
        self.queued = 0.0  # when the work that is queued ends, in the device's seconds
        self.reached = 0.0
        self.waits = 0

    def wait(self, until: float) -> None:
        self.waits += self.reached < until
        self.reached = max(self.reached, until)

    def event(self, enable_timing: bool) -> SimpleNamespace:
        event = SimpleNamespace(at=0.0)
        event.record = lambda stream: setattr(event, "at", self.queued)
        event.synchronize = lambda: self.wait(event.at)
        event.elapsed_time = lambda end: 1e3 * (end.at - event.at)
        return event


def test_on_gpus_a_steps_seconds_hold_the_devices_work_and_nothing_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, measured = Device(), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    section = SpeculationSection(drafter="eagle", selector="fixed", draft_len=1)
    drafting, drafted = StepDrafting(section, torch.device("cuda"), BUDGET), np.ones(2, int)
    drafting._selector.record = measured.append  # type: ignore[method-assign]
    draft_one = DraftStrategy("trained", 1)
    chosen = iter([draft_one, draft_one, NO_DRAFT, draft_one])
    monkeypatch.setattr(drafting._selector, "select", lambda num_running: next(chosen))
    for forward, draft in ((3.0, 2.0), (5.0, 1.0), (7.0, 4.0), (6.0, 2.0)):
        device.queued += forward
        if verified := drafting._choice.strategy.draft_len:
            device.reached = device.queued  # the tokens of a verified step have come to the host
        drafting.record(drafted * verified, drafted * verified, drafted > 0, is_decode=True)
        waits = device.waits
        drafting.begin()
        assert device.waits - waits == (forward == 6.0), "for a plain step's seconds only"
        device.queued += draft
        drafting.end(NO_DRAFTS)
    assert [(m.step_seconds, m.draft_seconds) for m in measured] == [(5.0, 2.0), (7.0, 1.0), (10.0, 0.0)]


def pre_rolled(*counts: int) -> Draft:
    total = sum(counts)
    return Draft(np.array(counts, np.int32), np.arange(total, dtype=np.int32) + 50, np.ones(total, np.float32))


def test_steps_with_pre_rolled_responses_teach_their_costs_and_not_the_selector() -> None:
    """Rows of a trained drafter's proposal draft from pre-rolled responses where these have a place."""
    taught, costs, now = [], [], [0.0]
    made = iter([pre_rolled(2, 0), pre_rolled(1, 1), Draft.empty(2)])

    def propose_pre_rolled(usual: Callable[[], Expected]) -> Draft:
        now[0] += 1.0
        return next(made)

    class Tokens:
        pre_rollouts = SimpleNamespace(is_empty=False, propose=propose_pre_rolled)

        def propose(self, strategy: DraftStrategy, draft: Draft, lists: list[list[int]]) -> list[list[int]]:
            rows = np.split(draft.tokens, np.cumsum(draft.counts)[:-1])
            return [row.tolist() or theirs for row, theirs in zip(rows, lists, strict=True)]

        def record(self, *of: float | None) -> None:
            costs.append(of)

    section = SpeculationSection(drafter="eagle", selector="fixed", draft_len=3)
    drafting = StepDrafting(section, torch.device("cpu"), BUDGET, Tokens(), clock=lambda: now[0])  # type: ignore[arg-type]
    drafting._selector.record = taught.append  # type: ignore[method-assign]
    two, zeros, theirs = np.ones(2, bool), np.zeros(2, int), torch.tensor([[7, 8, 9]] * 2)

    def step(drafted: list[int], accepted: list[int], was_pre_rolled: list[bool]) -> None:
        now[0] += 10.0
        drafting.record(np.array(drafted), np.array(accepted), two, True, np.array(was_pre_rolled))

    drafting.record(zeros, zeros, two, True, ~two)
    assert drafting.begin() == 3 and drafting.end(theirs) == [[50, 51], [7, 8, 9]]
    step([2, 3], [1, 3], [True, False])
    assert drafting.begin() == 0 and drafting.end(theirs[:, :0]) == [[50], [51]], "the drafter has no row"
    step([1, 1], [1, 0], [True, True])
    assert drafting.begin() == 3 and drafting.end(theirs) is theirs
    step([3, 3], [1, 3], [False, False])
    stats = drafting.take_stats()
    assert costs == [(2, 7, 10.0, 1.0), (2, 4, 10.0, 1.0), (2, 8, 10.0, None)]
    assert [m.num_rows for m in taught] == [8]
    assert [stats[f"pre_rolled_{name}"] for name in ("rows", "drafted", "accepted")] == [3, 4, 2]
    assert stats["steps_by_strategy"] == {"none": 1, "pre_rollout_31": 2, "trained_3": 1}


def test_ranks_of_an_engine_draft_as_the_first_one_has_chosen() -> None:
    section = SpeculationSection(drafter="eagle", selector="fixed", draft_len=3)
    first = StepDrafting(section, torch.device("cpu"), BUDGET)
    chosen: list[Choice] = []
    first._agree = lambda choice: chosen.append(choice) or choice  # type: ignore[func-returns-value]
    other = section.model_copy(update={"draft_len": 1})
    second = StepDrafting(other, torch.device("cpu"), BUDGET, agree=lambda _: chosen.pop())
    assert first.begin() == second.begin() == 3


@pytest.mark.parametrize(
    ("rows", "pre_rolled_counts", "length"), [(256, (), 7), (2048, (), 0), (2, (), 11), (4, (2040,), 1)]
)
def test_drafts_leave_a_token_of_the_steps_budget_for_every_row(
    rows: int, pre_rolled_counts: tuple[int, ...], length: int
) -> None:
    """vLLM's scheduler gives each row its whole draft, in order, and the rows behind the end of the budget nothing."""
    asked: list[DraftStrategy] = []
    counts = np.array([*pre_rolled_counts, *[0] * (rows - len(pre_rolled_counts))], np.int32)
    tokens = SimpleNamespace(
        pre_rollouts=SimpleNamespace(is_empty=not counts.any(), propose=lambda usual: pre_rolled(*counts)),
        propose=lambda strategy, draft, lists: asked.append(strategy) or lists,
    )
    section = SpeculationSection(drafter="suffix", selector="fixed", draft_len=11)
    drafting = StepDrafting(section, torch.device("cpu"), BUDGET, tokens)  # type: ignore[arg-type]
    zeros = np.zeros(rows, int)
    drafting.record(zeros, zeros, zeros == 0, True)
    assert drafting.begin() == length
    assert rows + counts.sum() + np.count_nonzero(counts == 0) * length <= BUDGET
    drafting.propose_lists([[] for _ in counts])
    assert [strategy.draft_len for strategy in asked] == [length], "of token drafters, too"


def test_zeros_that_the_engine_verifies_without_a_proposal_are_not_counted() -> None:
    """Near the model's last position vLLM proposes nothing, and verifies its longest draft of zeros for every row."""
    engine = Engine("fixed")
    for _ in range(3):
        engine.step(2)
    before, taught = engine.drafting.take_stats(), []
    engine.drafting._selector.record = taught.append  # type: ignore[method-assign]
    assert before["drafted_tokens"] == 2 * 2 * LENGTH
    two = np.full(2, 31)
    for drafted in (np.full(2, LENGTH), two, two):
        engine.drafting.record(drafted, drafted * 0, two > 0, True)
    stats = engine.drafting.take_stats()
    assert stats["drafted_tokens"] == 2 * LENGTH and stats["draft_seconds"] == pytest.approx(DRAFT_S * LENGTH)
    assert stats["steps_by_strategy"] == {f"trained_{LENGTH}": 1, "none": 2} and len(taught) == 1
