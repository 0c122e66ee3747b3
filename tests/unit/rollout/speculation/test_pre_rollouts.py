"""Places in earlier responses, and responses that do not depend on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import numpy as np
import pytest

from megatron_tlt.config.block_drafters import BlockShape
from megatron_tlt.drafters.dspark.config import BlockConfig
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.rollout.batch import StepResult
from megatron_tlt.rollout.engine import Engine
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.speculation.pre_rollouts import LONGEST, PreRolledDrafter
from megatron_tlt.rollout.speculation.step_costs import Expected, RowCosts
from megatron_tlt.types import Prompt, SamplingParams, SpeculationStats
from tests.helpers.engines import Job, Responses, generate_all, random_jobs, small_config, speculating_engine
from tests.helpers.suffix_tables import make_request
from tests.helpers.tiny_models import random_weights

VOCAB = 131
Drafts = dict[tuple[int, int], np.ndarray]
FIXED = {"drafter": "none", "selector": "fixed"}


# -- places


class Place:
    """One row with the earlier response `tokens`, whose new tokens are given."""

    def __init__(self, tokens: list[int], first: list[int], costs: RowCosts | None = None) -> None:
        self.rows = RunningRows(2, 16, 40, 1000, max_output=600)
        self.source = PreRolledDrafter(self.rows, 64, costs)
        self.source.begin({(0, 0): np.array(tokens, np.int32)})
        request = make_request(0, [1, 2], first)
        request.params = SamplingParams(max_tokens=500)
        self.rows.start(request, [0], 2, 2)
        self.source.start(request)
        self.emit([])

    def emit(self, tokens: list[int]) -> None:
        for token in tokens:
            self.rows.advance(np.array([token], np.int32), np.zeros(1, np.float32))
        self.source.follow()

    def draft(self, length: int = 5) -> list[int]:
        return self.source.propose(Expected).tokens.tolist()[:length]


RISING, TWICE = list(range(10, 90)), [1, 2, 3, 50, 8, 9, 51, *range(60, 70), 8, 9, 52, *range(70, 80), 7, 8, 9, 53]
PLACES: dict[str, tuple[list[int], list[int], list[tuple[list[int], list[int]]]]] = {
    "it moves on and ends with the response": (
        *(RISING[:10], [10]),
        [([], [11, 12, 13, 14, 15]), ([11, 12, 13, 14, 15, 16], [17, 18, 19]), ([17, 18, 19], [])],
    ),
    "a last token that is nowhere, then one token beside the response": (
        *(RISING, [10]),
        [([11, 700], []), ([13], [14, 15]), ([14, 15, 30], []), ([31], [32, 33, 34])],
    ),
    "tokens put in": (RISING, [10], [([701, 702, 703, 32, 33], [34, 35, 36])]),
    "the nearest of two places, unless more tokens match farther away": (
        *(TWICE, [1]),
        [([2, 99, 8, 9], [51]), ([98, 7, 8, 9], [53])],
    ),
    "a foreign response is given up": (
        *(list(range(10, 400)), [900]),
        [([901 + i % 50 for i in range(200)], []), ([300, 301, 302, 303], [])],
    ),
    "tokens of another vocabulary end it": ([10, 11, 12, 1000, 13], [10], [([], [11, 12])]),
    "a negative token": ([10, -1, 12], [10], [([], [])]),
    "nothing": ([], [10], [([], [])]),
}


@pytest.mark.parametrize(("tokens", "first", "steps"), PLACES.values(), ids=PLACES)
def test_places(tokens: list[int], first: list[int], steps: list[tuple[list[int], list[int]]]):
    """What is drafted behind further tokens."""
    place = Place(tokens, first)
    for new, drafted in steps:
        place.emit(new)
        found = place.draft()
        assert found[: len(drafted)] == drafted and bool(found) == bool(drafted)


def test_a_later_turn_does_not_draft_from_an_earlier_response_that_ended_before_it():
    earlier = [10, 11, 12, 13, 14]
    for end, drafted in ((3, [13, 14]), (5, [])):
        place = Place(earlier, [10])
        request = place.rows.requests[0]
        place.rows.stop(request)
        request.output, request.logprobs = [*earlier[:end], 50, 11, 12], [0.0] * (end + 3)
        request.given = ((end, end + 1),)  # the environment's token
        place.rows.start(request, [0], 2, 2)
        place.source.start(request)
        place.emit([])
        assert place.draft() == drafted


def test_acceptance_falls_along_a_draft_and_is_learnt_from_every_token():
    place = Place(list(range(10, 90)), [10])
    draft = place.source._draft(np.array([20], np.int32))
    assert (np.diff(draft.cumulative_acceptance) < 0).all() and draft.cumulative_acceptance[0] > 0.9
    lengths = []
    for start in range(10, 80, 5):
        place.source.begin({(0, 0): np.arange(start, start + 90, dtype=np.int32)})
        place.source.start(place.rows.requests[0])
        place.rows.output_len[0] = 1
        place.rows.outputs[0, 0] = start
        place.rows.write_at[0] = 1
        place.emit([])
        lengths.append(place.source._lengths().item())
        place.emit([700])
    assert lengths[0] and not lengths[-1], "they seldom match"


def measured(place: Place, per_row: float, verifying: float) -> Callable[[int], float]:
    """The seconds of a step that verifies so many tokens, which `place` has measured."""

    def seconds(drafted: int) -> float:
        return 1.0 + per_row * (1 + drafted) + verifying * (drafted > 0)

    for drafted in (0, 1, 3, 7, 15, 31) * 20:
        place.source.record(1, 1 + drafted, seconds(drafted), 0.0 if drafted else None)
    return seconds


PAYS = [(0.0, 0.5), (0.1, 0.0), (0.4, 0.1), (2.0, 0.0), (0.1, 50.0)]
USUAL = [Expected(), Expected(4.0, 5.0, 1.0), Expected(6.0, 7.0, 0.5), Expected(30.0, 31.0)]


@pytest.mark.parametrize(
    ("per_row", "verifying", "usual"), [*((*costs, Expected()) for costs in PAYS), *((0.1, 0.0, u) for u in USUAL[1:])]
)
def test_a_step_verifies_as_many_tokens_as_pay(per_row: float, verifying: float, usual: Expected):
    """The number of the most likely tokens that gives most tokens a second, by trying every number; the first of them
    takes away what the selector has chosen for the row, so a fast drafter wins.
    """
    place = Place(list(range(10, 200)), [10], RowCosts())
    seconds = measured(place, per_row, verifying)
    acceptance = place.source._draft(np.array([LONGEST], np.int32)).cumulative_acceptance.astype(float)
    speeds = [usual.tokens / (seconds(int(usual.rows) - 1) + usual.draft_seconds)]
    speeds += [(1 + acceptance[:n].sum()) / seconds(n) for n in range(1, LONGEST + 1)]
    best = int(np.argmax(speeds))
    assert len(place.source.propose(lambda: usual).tokens) == pytest.approx(best, abs=1)
    assert (best == 0) == (verifying == 50.0 or usual.tokens == 30.0)


def test_drafts_that_do_not_pay_are_tried_again():
    """Trials lose 1 % of the plain steps' seconds."""
    place, drafted = Place(list(range(10, 600)), [10], RowCosts()), 0
    seconds = measured(place, 0.1, 50.0)
    for token in range(11, 111):
        drafted += bool(place.draft())
        place.source.record(1, 1, seconds(0), None)
        place.emit([token])
    assert drafted == 0
    for _ in range(5000):
        place.source.record(1, 1, seconds(0), None)
    for _ in range(9):
        drafted += bool(place.draft())
    assert drafted > 0


# -- responses


def run(engine: Engine, jobs: list[Job], drafts: Mapping[tuple[int, int], np.ndarray]) -> Responses:
    assert engine.speculator is not None
    engine.speculator.begin(drafts)
    responses = generate_all(engine, jobs)
    engine.speculator.end_generate()
    assert engine.blocks.num_free == engine.blocks.num_blocks
    return responses


def kinds_of_drafts(right: Drafts) -> dict[str, Drafts]:
    rng = np.random.default_rng(0)
    names = list(right)
    return {
        "right": right,
        "partial": {name: tokens[: len(tokens) // 2] for name, tokens in list(right.items())[::2]},
        "of another request": {name: right[names[i - 1]] for i, name in enumerate(names)},
        "shifted": {name: np.concatenate((tokens[3:], tokens[:3])) for name, tokens in right.items()},
        "spoiled": {n: np.where(rng.random(len(t)) < 0.1, 5, t).astype(np.int32) for n, t in right.items()},
        "foreign": {n: np.concatenate((t[: len(t) // 2], [VOCAB, -4, 1 << 30], t)) for n, t in right.items()},
        "too long": {name: np.tile(np.append(tokens, 7), 300) for name, tokens in right.items()},
    }


def plain(family: str, jobs: list[Job]) -> tuple[Responses, Drafts, Any]:
    config = small_config(family)
    weights = random_weights(config, seed=5)
    expected = generate_all(speculating_engine(config, weights, speculation={"drafter": "none"}), jobs)
    return expected, {name: np.array(tokens, np.int32) for name, (tokens, _) in expected.items()}, weights


def stats_of(engine: Engine) -> SpeculationStats:
    return engine.take_stats().speculation


def emitted_a_row(stats: SpeculationStats) -> float:
    """Mean tokens that a row emits whose draft was of a pre-rollout."""
    return 1 + stats.pre_rolled_accepted / stats.pre_rolled_rows


DRAFTERS: dict[str, dict[str, Any]] = {
    "none": FIXED,
    "none cost": {"drafter": "none"},
    "suffix": {"drafter": "suffix", "selector": "fixed", "draft_len": 5},
    "eagle": {"drafter": "eagle", "selector": "fixed", "draft_len": 4, "catch_up": 16},
    "eagle cost": {"drafter": "eagle"},
    "dspark": {"drafter": "dspark", "selector": "fixed", "draft_len": 4},
    "bandit": {"drafter": "suffix", "selector": "beg_mab"},
}


@pytest.mark.parametrize(
    ("family", "name"), [*(("qwen2", name) for name in DRAFTERS), ("qwen2_moe", "none"), ("qwen2_moe", "eagle")]
)
def test_equal_whatever_was_pre_rolled(family: str, name: str):
    """Ample memory, and so little that requests are preempted and drafts find no blocks. Rows without an earlier
    response draft by the drafter.
    """
    jobs = random_jobs(VOCAB, 5, seed=3, longest=28)
    expected, right, weights = plain(family, jobs)
    config, shape = small_config(family), None
    if name == "dspark":
        shape = BlockConfig.of(config, BlockShape(2, (0,), 6, 0, 7, False, 8, (0, 9)))
    for blocks in (200, 10):
        engine = speculating_engine(config, weights, speculation=DRAFTERS[name], shape=shape, num_blocks=blocks)
        for kind, drafts in kinds_of_drafts(right).items():
            assert run(engine, jobs, drafts) == expected, kind
            stats = stats_of(engine)
            assert "cost" in name or stats.pre_rolled_rows > 0, kind
            assert stats.pre_rolled_accepted <= stats.pre_rolled_drafted <= stats.drafted_tokens
            assert (name, kind) != ("suffix", "partial") or stats.pre_rolled_drafted < stats.drafted_tokens
        assert run(engine, jobs, {}) == expected
        assert stats_of(engine).pre_rolled_rows == 0


def long_jobs(count: int = 3) -> list[Job]:
    params = SamplingParams(max_tokens=160, ignore_eos=True, seed=3)
    return [(i, list(range(1 + i, 20)), params, 2) for i in range(count)]


def test_right_drafts_are_accepted_in_the_longest_blocks():
    jobs = long_jobs()
    expected, right, weights = plain("llama", jobs)
    engine = speculating_engine(small_config("llama"), weights, speculation=FIXED, max_running=4)
    assert run(engine, jobs, right) == expected
    stats = stats_of(engine)
    assert stats.pre_rolled_accepted == stats.pre_rolled_drafted
    assert emitted_a_row(stats) > 0.8 * (LONGEST + 1)


def test_accepted_tokens_are_counted_alike_where_a_response_ends_in_its_draft():
    jobs: list[Job] = [(i, list(range(1 + i, 20)), SamplingParams(max_tokens=160, seed=3), 4) for i in range(3)]
    expected, right, weights = plain("llama", jobs)
    engine = speculating_engine(small_config("llama"), weights, speculation=FIXED, max_running=4)
    assert run(engine, jobs, right) == expected
    stats = stats_of(engine)
    assert stats.emitted_tokens < stats.row_steps + stats.accepted_tokens, "what is behind a stop token is cut"
    assert stats.accepted_tokens == stats.pre_rolled_accepted > 0, "none is of a drafter"


def test_an_engine_takes_as_many_prompts_as_memory_has_room_for():
    """Other replicas take the rest."""
    config = small_config("llama")
    engine = speculating_engine(config, random_weights(config), speculation=FIXED, num_blocks=20, max_running=64)
    assert engine.speculator is not None
    engine.speculator.begin({(0, 0): np.array([1, 2], np.int32)})
    tokens, taken = tuple(range(1, 2 * engine.blocks.block_size + 1)), 0
    while engine.has_room:
        engine.begin(Prompt(taken, "q", tokens, ""), SamplingParams(max_tokens=4), [0], {}, False)
        taken += 1
    assert taken == 7, "two blocks each, and one for the first sample"


def test_rows_are_bounded():
    """Many requests: fewer rows each, all together no more than a step has room for."""
    jobs = long_jobs(8)
    expected, right, weights = plain("llama", jobs)
    engine = speculating_engine(small_config("llama"), weights, speculation=FIXED, max_running=16, budget=40)
    assert engine.speculator is not None
    fed, verify = [], engine.runner.verify

    def counted(draft: Draft) -> StepResult:
        fed.append(draft.num_tokens + len(draft.counts))
        return verify(draft)

    engine.runner.verify = counted  # type: ignore[method-assign]
    assert run(engine, jobs, right) == expected
    assert max(fed) <= 40


def test_the_cost_model_learns_without_a_drafter():
    """By a clock after which all steps take as long, the longest drafts."""
    jobs = long_jobs(4)
    expected, right, weights = plain("llama", jobs)

    engine = speculating_engine(small_config("llama"), weights, speculation={"drafter": "none"}, max_running=2)
    assert engine.speculator is not None
    engine.speculator._clock = count().__next__
    for _ in range(2):
        assert run(engine, jobs, right) == expected
    assert emitted_a_row(stats_of(engine)) > 15
