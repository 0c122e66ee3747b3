"""What an engine of two ranks sends in a step, and that both then do the same."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.messages import agreed_draft, agreed_strategy
from megatron_tlt.types import NO_DRAFT, DraftStrategy
from tests.helpers.engines import answer_all, make_engine, random_jobs, small_config, speculating_engine
from tests.helpers.thread_ranks import ThreadRank, on_ranks
from tests.helpers.tiny_models import random_weights

CONFIG = small_config("qwen2")
WEIGHTS = random_weights(CONFIG)


def draft(rng: np.random.Generator, counts: list[int], with_all: bool) -> Draft:
    total, rows = sum(counts), len(counts)
    ints = [rng.integers(0, 1000, total, dtype=np.int32) for _ in range(4)]
    more = (ints[2], ints[3], rng.integers(0, 2, rows, dtype=np.int8), rng.random(rows)) if with_all else ()
    return Draft(np.array(counts, np.int32), ints[0], rng.random(total, np.float32), ints[1], *more)


@pytest.mark.parametrize("with_all", [False, True])
def test_every_rank_has_the_first_ones_strategy_and_draft(with_all: bool) -> None:
    """Others may have drafted another number of nodes, other fields, or nothing."""
    first = draft(np.random.default_rng(0), [3, 0, 4], with_all)
    strategy = DraftStrategy("eagle", 5, 2, 7, 0.1)

    def one_rank(tp: ThreadRank) -> tuple[DraftStrategy, Draft]:
        own = first if tp.rank == 0 else draft(np.random.default_rng(1), [0, 1, 0], not with_all)
        return agreed_strategy(tp, strategy if tp.rank == 0 else NO_DRAFT), agreed_draft(tp, own, 9)

    for got, there in on_ranks(2, one_rank):
        assert got == strategy
        for name in Draft.__slots__:
            mine, wanted = getattr(there, name), getattr(first, name)
            assert (mine is None) == (wanted is None), name
            assert wanted is None or (mine.dtype == wanted.dtype and np.array_equal(mine, wanted)), name


class Counting(ThreadRank):
    """Counts broadcasts, by bytes."""

    def broadcast(self, tensor) -> None:
        self.sent.append(tensor.nbytes)
        super().broadcast(tensor)


@pytest.mark.parametrize("drafter", ["none", "hybrid"])
def test_a_step_sends_tokens_and_at_most_two_messages_of_known_size(drafter: str) -> None:
    speculation = {"drafter": drafter, "selector": "fixed", "draft_len": 3}
    jobs = random_jobs(CONFIG.vocab_size, 3, seed=5)
    want = answer_all(make_engine(CONFIG, WEIGHTS, "torch"), jobs)

    def one_rank(tp: ThreadRank) -> tuple[list, list[list[int]]]:
        tp.__class__, tp.sent, steps = Counting, [], []
        engine = speculating_engine(CONFIG, WEIGHTS, "torch", speculation=speculation, tp=tp)
        step = engine.step

        def counted():
            tp.sent = []
            ended = step()
            steps.append(tp.sent)
            return ended

        engine.step = counted
        return answer_all(engine, jobs), steps

    (answers, steps), (others, _) = on_ranks(2, one_rank)
    assert answers == others
    assert {at: tokens for at, (tokens, _) in answers.items()} == {at: tokens for at, (tokens, _) in want.items()}
    if drafter == "none":
        assert max(map(len, steps)) == 1
        return
    decoding = [sent for sent in steps if len(sent) > 1]
    assert len(decoding) > 20
    for strategy, *drafted, draft, _tokens in decoding:  # the drafter's own forwards send what each position drew
        assert strategy == 48 and draft <= 4 * (6 + 6 * (4 + 5 * 3)) and len(drafted) <= 3
