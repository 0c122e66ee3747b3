"""The suffix drafter and pre-rolled responses on rows that follow another engine's batch."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_tlt.backends.token_drafts import Began, TokenDrafts
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.models.decoders.native.build import find_compiler
from megatron_tlt.rollout.speculation.pre_rollouts import choose
from megatron_tlt.rollout.speculation.selector import FixedSelector
from megatron_tlt.types import NO_DRAFT, DraftStrategy

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler: no suffix drafter")
TEXT = [7, 3, 9, 4, 8, 5, 6, 2, 11, 13]
PROMPT = [20, 21, 22]
LIMIT = 16
THREE = DraftStrategy("suffix", 3)


def make(drafter: str = "suffix", longest: int = 5, verify_rows: int = 64, budget: int = 64) -> TokenDrafts:
    """Steps verify as many tokens of pre-rolled responses as they may."""
    section = {"drafter": drafter, "selector": "fixed", "suffix": {"history_mib": 16}}
    return TokenDrafts(SpeculationSection.model_validate(section), 4, 64, 32, longest, verify_rows, budget)


def propose(b: TokenDrafts, strategy: DraftStrategy = THREE) -> list[list[int]]:
    """Of a batch of four rows."""
    return b.propose(*choose(FixedSelector(strategy), b.pre_rollouts, 4), [[] for _ in range(4)])


def note(
    b: TokenDrafts,
    names: str,
    done: list[int],
    tokens: list[int],
    drawn: list[bool] | None = None,
    began: list[int] | None = None,
    pre_rolled: dict[str, list[int]] | None = None,
) -> list[bool]:
    """A step in which each row draws one token, greedily, without drafts; the rows that drafted from pre-rolled ones.

    `began`: responses began with these.
    """
    count = len(names)
    zeros = np.zeros(count, np.int64)
    out = np.array(tokens, np.int32)[:, None]
    is_drawn = np.array([True] * count if drawn is None else drawn)
    keys, cold = np.arange(count, dtype=np.uint64), np.zeros(count, np.float32)

    def came(name: str) -> Began:
        return Began(PROMPT, began or [], 5, LIMIT, (pre_rolled or {}).get(name, []))

    return b.note(list(names), came, keys, cold, np.array(done), zeros, zeros, out, is_drawn).tolist()


@needs_compiler
def test_a_sibling_is_drafted_from_whatever_the_order_of_rows() -> None:
    b = make()
    for t, token in enumerate(TEXT):
        note(b, "a", [t], [token])
    for t, token in enumerate(TEXT[:4]):
        note(b, "ba", [t, 10 + t], [token, 1])
    assert propose(b)[0] == TEXT[4:7], "b follows a"
    note(b, "acb", [14, 0, 4], [1, 7, TEXT[4]], [True, False, True])
    drafts = propose(b)
    assert drafts[1] == [], "c's prompt is still being read"
    assert drafts[2] == TEXT[5:8]
    for name in "ab":
        b.finish(name)
    note(b, "d", [0], [TEXT[0]])
    note(b, "d", [1], [TEXT[1]])
    assert propose(b)[0] == [], "c never drew a token, and a and b have ended: nothing stays"


@needs_compiler
def test_a_turn_is_drafted_from_the_turns_before_it() -> None:
    b = make()
    note(b, "a", [6], [TEXT[0]], began=TEXT[:6])
    note(b, "a", [7], [TEXT[1]])
    assert propose(b)[0] == TEXT[2:5], "its own"
    note(b, "b", [2], [TEXT[2]], began=TEXT[:2])
    assert propose(b)[0] == TEXT[3:6], "a sibling's"


@needs_compiler
@pytest.mark.parametrize(("fed", "accepted", "missed"), [(3, 1, 1), (2, 2, 0)])
def test_match_rates_count_what_vllm_verified(fed: int, accepted: int, missed: int) -> None:
    """vLLM verifies `fed` of three drafted tokens; the first `accepted` are right. None counts behind a wrong one."""
    b = make()
    for t, token in enumerate(TEXT):
        note(b, "a", [t], [token])
    for t, token in enumerate(TEXT[:4]):
        note(b, "b", [t], [token])
    assert propose(b)[0] == TEXT[4:7]
    keys, cold = np.zeros(1, np.uint64), np.zeros(1, np.float32)
    out = np.array([[*TEXT[4 : 4 + accepted], *[1] * (4 - accepted)]], np.int32)
    counts = np.array([4]), np.array([fed]), np.array([accepted])
    b.note(["b"], lambda _: Began(PROMPT, [], 5, LIMIT, []), keys, cold, *counts, out, np.array([True]))
    assert b._drafter._calibration._counts.sum(0).tolist() == [missed, accepted]


def test_rows_draft_from_their_own_pre_rolled_responses_each_as_far_as_it_goes() -> None:
    b = make("none")
    whole, cut, foreign = TEXT, TEXT[:4], [*TEXT[:2], 32, *TEXT[3:]]
    note(b, "abcd", [0] * 4, TEXT[:1] * 4, pre_rolled={"a": whole, "b": cut, "d": foreign})
    assert propose(b, NO_DRAFT) == [TEXT[1:6], TEXT[1:4], [], TEXT[1:2]], "five at most; there is no token 32"
    assert note(b, "cab", [1, 1, 1], [TEXT[1]] * 3) == [False, True, True]
    assert propose(b, NO_DRAFT)[:3] == [[], TEXT[2:7], TEXT[2:4]], "in the batch's new order"
    b.finish("a")
    note(b, "eb", [0, 2], TEXT[::2][:2], [False, True])
    assert propose(b, NO_DRAFT)[:2] == [[], TEXT[3:4]], "e is in the middle of its prompt"
    note(b, "eb", [0, 3], TEXT[:1] * 2, pre_rolled={"e": [TEXT[0], 1, 1]})
    assert propose(b, NO_DRAFT)[0] == [1, 1], "a slot that is used again"
    for name in "bcde":
        b.finish(name)
    note(b, "f", [0], [TEXT[0]])
    assert b.pre_rollouts.is_empty


def test_neither_the_last_token_nor_more_rows_than_a_step_has_are_drafted() -> None:
    b = make("none", longest=31)
    long = list(range(2, 32))
    note(b, "ab", [0, 0], long[:1] * 2, pre_rolled={"a": long, "b": [long[0], 1, 1]})
    assert propose(b, NO_DRAFT)[0] == long[1 : LIMIT - 1]
    for small in (make("none", longest=31, verify_rows=9), make("none", longest=31, budget=9)):
        note(small, "abcd", [0] * 4, long[:1] * 4, pre_rolled=dict.fromkeys("abcd", long))
        assert sum(map(len, propose(small, NO_DRAFT))) == 5


@needs_compiler
def test_the_drafter_drafts_for_rows_without_a_place() -> None:
    b = make()
    for t, token in enumerate(TEXT):
        note(b, "a", [t], [token])
    for t, token in enumerate(TEXT[:4]):
        pre_rolled = {"c": [*TEXT[:4], 30, 29]}
        note(b, "bca", [t, t, len(TEXT) + t], [token, token, 1], pre_rolled=pre_rolled)
    assert propose(b)[:2] == [TEXT[4:7], [30, 29]]
    assert note(b, "cb", [4, 4], [30, TEXT[4]]) == [True, False]
    counts = b._drafter._calibration._counts
    assert counts.sum() == 0, "no token was fed, and none of another source is the drafter's"
