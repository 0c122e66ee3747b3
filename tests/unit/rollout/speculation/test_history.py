"""Earlier responses: which are kept, for how long, and that they travel."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_tlt.rollout.speculation.history import ResponseHistory
from megatron_tlt.types import PastResponse


def response(name: str, prompt_id: int, score: float, tokens: int = 3, mark: int = 0) -> PastResponse:
    return PastResponse(name, np.full(tokens, mark, np.int32), score, prompt_id)


def test_best_scores_first_later_visits_first_among_equals() -> None:
    history = ResponseHistory(2, 3, 1)
    history.remember([response("q", 1, 0.0, mark=1), response("q", 1, 1.0, mark=2)])
    history.remember(
        [response("q", 5, 1.0, mark=3), response("q", 5, float("nan"), mark=4), response("q", 5, 0.5, mark=5)]
    )
    assert [int(a.token_ids[0]) for a in history.of("q")] == [3, 2, 5]
    assert history.of("unknown") == []


def test_only_the_last_visits_are_kept() -> None:
    history = ResponseHistory(2, 8, 1)
    for prompt_id in (1, 4, 9):
        history.remember([response("q", prompt_id, 1.0)])
    assert sorted(a.prompt_id for a in history.of("q")) == [4, 9]
    one = ResponseHistory(1, 8, 1)
    one.remember([response("q", 1, 1.0), response("q", 4, 0.0)])
    assert [a.prompt_id for a in one.of("q")] == [4]


def test_expected_length_is_that_of_the_latest_visit() -> None:
    history = ResponseHistory(2, 1, 1)
    assert history.expected_length("q") is None
    history.remember([response("q", 1, 1.0, tokens=100)])
    history.remember([response("q", 2, 0.0, tokens=10), response("q", 2, 0.0, tokens=20)])
    assert history.expected_length("q") == 15  # also of the responses that were not worth keeping


def test_questions_updated_longest_ago_are_dropped_first() -> None:
    history = ResponseHistory(2, 8, 1)
    for i in range(10):
        history.remember([response(f"q{i}", i, 1.0, tokens=30_000)])  # 120 kB each: eight fit
    assert [bool(history.of(f"q{i}")) for i in range(10)] == [False, False] + [True] * 8
    history.remember([response("q2", 20, 1.0)])
    for i in range(10, 12):
        history.remember([response(f"q{i}", i, 1.0, tokens=30_000)])
    assert history.of("q2")
    assert not history.of("q3")
    history.remember([response("huge", 30, 1.0, tokens=1 << 20)])
    # nothing but it would fit, and it does not either
    assert not any(history.of(name) for name in ["huge", *(f"q{i}" for i in range(12))])


@pytest.mark.parametrize("count", [0, 40])
def test_expected_lengths_survive_a_checkpoint(count: int) -> None:
    history, restored = ResponseHistory(2, 3, 1), ResponseHistory(2, 3, 1)
    history.remember([response(f"q{i % 7}", i, i / 10, tokens=i, mark=i) for i in range(count)])
    restored.remember([response("gone", 1, 1.0)])
    restored.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert restored.state_dict() == history.state_dict()
    assert len(history.state_dict()["mean_lengths"]) == min(count, 7)
    assert restored.expected_length("gone") is None
    for i in range(7):
        assert history.expected_length(f"q{i}") == restored.expected_length(f"q{i}")
        assert restored.of(f"q{i}") == []
    restored.remember([response("q3", 50, 1.0, tokens=9)])  # goes on as before
    assert restored.expected_length("q3") == 9
    assert len(restored.of("q3")) == 1
