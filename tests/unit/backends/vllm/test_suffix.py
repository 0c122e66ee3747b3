"""The suffix drafter on rows that follow another engine's batch."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_tlt.backends.vllm.plugin.suffix import SuffixBridge
from megatron_tlt.config.speculation import SuffixSection
from megatron_tlt.models.native.build import find_compiler
from megatron_tlt.types import DraftStrategy

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler: no suffix drafter")
TEXT = [7, 3, 9, 4, 8, 5, 6, 2, 11, 13]
PROMPT = [20, 21, 22]
THREE = DraftStrategy("suffix", 3)


def bridge() -> SuffixBridge:
    return SuffixBridge(SuffixSection(history_mib=16), max_requests=4, max_len=64, vocab=32)


def note(
    b: SuffixBridge,
    names: str,
    done: list[int],
    tokens: list[int],
    drawn: list[bool] | None = None,
    began: list[int] | None = None,
) -> None:
    """A step in which each row draws one token, greedily, without drafts. `began`: responses began with these."""
    count = len(names)
    zeros = np.zeros(count, np.int64)
    out = np.array(tokens, np.int32)[:, None]
    is_drawn = np.array([True] * count if drawn is None else drawn)
    keys, cold = np.arange(count, dtype=np.uint64), np.zeros(count, np.float32)
    b.note(list(names), lambda _: (PROMPT, began or [], 5), keys, cold, np.array(done), zeros, zeros, out, is_drawn)


def test_a_sibling_is_drafted_from_whatever_the_order_of_rows() -> None:
    b = bridge()
    for t, token in enumerate(TEXT):
        note(b, "a", [t], [token])
    for t, token in enumerate(TEXT[:4]):
        note(b, "ba", [t, 10 + t], [token, 1])
    assert b.propose_lists([[1], [1]], THREE)[0] == TEXT[4:7], "b follows a"
    note(b, "acb", [14, 0, 4], [1, 7, TEXT[4]], [True, False, True])
    drafts = b.propose_lists([[1], [], [1]], THREE)
    assert drafts[1] == [], "c's prompt is still being read"
    assert drafts[2] == TEXT[5:8]
    for name in "ab":
        b.finish(name)
    note(b, "d", [0], [TEXT[0]])
    note(b, "d", [1], [TEXT[1]])
    assert b.propose_lists([[1]], THREE) == [[]], "c never drew a token, and a and b have ended: nothing stays"


def test_a_turn_is_drafted_from_the_turns_before_it() -> None:
    b = bridge()
    note(b, "a", [6], [TEXT[0]], began=TEXT[:6])
    note(b, "a", [7], [TEXT[1]])
    assert b.propose_lists([[1]], THREE) == [TEXT[2:5]], "its own"
    note(b, "b", [2], [TEXT[2]], began=TEXT[:2])
    assert b.propose_lists([[1]], THREE) == [TEXT[3:6]], "a sibling's"


@pytest.mark.parametrize(("fed", "accepted", "missed"), [(3, 1, 1), (2, 2, 0)])
def test_match_rates_count_what_vllm_verified(fed: int, accepted: int, missed: int) -> None:
    """vLLM verifies `fed` of three drafted tokens; the first `accepted` are right. None counts behind a wrong one."""
    b = bridge()
    for t, token in enumerate(TEXT):
        note(b, "a", [t], [token])
    for t, token in enumerate(TEXT[:4]):
        note(b, "b", [t], [token])
    assert b.propose_lists([[1]], THREE) == [TEXT[4:7]]
    keys, cold = np.zeros(1, np.uint64), np.zeros(1, np.float32)
    out = np.array([[*TEXT[4 : 4 + accepted], *[1] * (4 - accepted)]], np.int32)
    counts = np.array([4]), np.array([fed]), np.array([accepted])
    b.note(["b"], lambda _: (PROMPT, [], 5), keys, cold, *counts, out, np.array([True]))
    assert np.array(b.state_dict()["rates"]["counts"]).sum(0).tolist() == [missed, accepted]
