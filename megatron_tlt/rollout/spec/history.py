"""Earlier answers to each question, for the suffix drafter and to expect lengths, in bounded memory.

Scored answers of all ranks are added in one order, so that every rank holds the same history and a question's next
visit may come to any of them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_tlt.types import PastAnswer, Prompt

_OVERHEAD = 200  # bytes of a question, and of an answer beside its tokens, about


@dataclass(slots=True)
class _Question:
    answers: list[PastAnswer]  # best first
    size: int  # bytes
    mean_length: float  # tokens of all answers of the latest visit, also of those not kept


class AnswerHistory:
    """Of each question the best answers of its latest visits. Questions updated longest ago are dropped first."""

    def __init__(self, epochs: int, answers: int, mib: int):
        """At most `answers` answers of a question, from its last `epochs` visits; at most `mib` MiB in all.

        With `answers` 0 only lengths are kept.
        """
        self._epochs, self._answers, self._most_bytes = epochs, answers, mib << 20
        self._questions: OrderedDict[str, _Question] = OrderedDict()  # updated longest ago first
        self._bytes = 0

    @property
    def most_answers(self) -> int:
        """Most answers of a question whose tokens are kept; 0: lengths only."""
        return self._answers

    @property
    def num_bytes(self) -> int:
        """Memory of questions and kept answers, about."""
        return self._bytes

    def remember(self, answers: Sequence[PastAnswer]) -> None:
        """Keeps scored answers, in the order given. Those without a `dataset_id` are not kept. Mutates the history."""
        by_question: dict[str, list[PastAnswer]] = {}
        for answer in answers:
            if answer.dataset_id and self._epochs > 0:
                by_question.setdefault(answer.dataset_id, []).append(_copy(answer))
        for name, new in by_question.items():
            old = self._forget(name)
            everything = new + (old.answers if old is not None else [])
            visits = sorted({a.visit for a in everything})[-self._epochs :]
            latest = [a.length for a in new if a.visit == visits[-1]]
            mean = sum(latest) / len(latest) if latest else (old.mean_length if old is not None else 0.0)
            kept = [a for a in everything if a.visit in visits and len(a.token_ids) == a.length]
            kept.sort(key=_worst_last)  # stable: equals stay in the order given
            self._keep(name, kept[: self._answers], mean)
        while self._bytes > self._most_bytes:
            self._forget(next(iter(self._questions)))

    def of(self, dataset_id: str) -> list[PastAnswer]:
        """The kept answers to a question: best scores first, later visits first among equals."""
        question = self._questions.get(dataset_id)
        return list(question.answers) if question is not None else []

    def expected_length(self, dataset_id: str) -> float | None:
        """Mean tokens of the answers of the question's latest visit; None for a question without history."""
        question = self._questions.get(dataset_id)
        return question.mean_length if question is not None else None

    def longest_first(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Prompts with the longest expected answers first: a long answer started late would run alone at the end.

        Equals stay in their order; prompts never seen before are expected to be average.
        """
        lengths = [self.expected_length(p.dataset_id) for p in prompts]
        past = [n for n in lengths if n is not None]
        usual = sum(past) / len(past) if past else 0.0
        order = sorted(range(len(prompts)), key=lambda i: -(usual if (n := lengths[i]) is None else n))
        return [prompts[i] for i in order]

    def state_dict(self) -> dict[str, Any]:
        """Expected lengths by question, JSON-able: a resumed run must start its prompts in the same order.

        The answers are left out: they only make drafts better, and would fill the manifest of every checkpoint.
        """
        return {"mean_lengths": {name: q.mean_length for name, q in self._questions.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave, in place of everything."""
        self._questions, self._bytes = OrderedDict(), 0
        for name, mean in state["mean_lengths"].items():
            self._keep(name, [], float(mean))

    def _keep(self, name: str, answers: list[PastAnswer], mean_length: float) -> None:
        size = _OVERHEAD + sum(a.token_ids.nbytes + _OVERHEAD for a in answers)
        self._questions[name] = _Question(answers, size, mean_length)
        self._bytes += size

    def _forget(self, name: str) -> _Question | None:
        question = self._questions.pop(name, None)
        if question is not None:
            self._bytes -= question.size
        return question


def readable_tokens(answers: Sequence[PastAnswer], most: int) -> list[PastAnswer]:
    """The answers of one visit, without the tokens of those that a history of `most` answers a question cannot keep."""
    best = sorted(range(len(answers)), key=lambda i: _worst_last(answers[i]))[:most]
    none = np.empty(0, np.int32)
    return [a if i in best else replace(a, token_ids=none) for i, a in enumerate(answers)]


def _worst_last(answer: PastAnswer) -> tuple[float, int]:
    """Sorting key: better scores first, then later visits."""
    return math.inf if math.isnan(answer.score) else -answer.score, -answer.visit


def _copy(answer: PastAnswer) -> PastAnswer:
    """The same with tokens of its own: they may be a view of a larger array, which must not be kept."""
    return replace(answer, token_ids=np.array(answer.token_ids, np.int32))
