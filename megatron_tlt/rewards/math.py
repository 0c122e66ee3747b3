"""Mathematical equality with the reference answer, by `math-verify` (sympy)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from itertools import product
from typing import Any, TypeVar

from math_verify import ExprExtractionConfig, parse, verify
from math_verify.errors import TimeoutException

from megatron_tlt.config.data import RewardConfig
from megatron_tlt.rewards.base import Scorer, compile_pattern, extract_answer, references_of
from megatron_tlt.rewards.disagreement import contradicts_itself, disagree
from megatron_tlt.rewards.spelling import (
    choice,
    conclusion,
    decimals,
    is_comparable,
    last_clause,
    plain,
    plain_answer,
    quantity,
)
from megatron_tlt.types import Prompt, Sample

# math-verify stops itself after so many seconds, by SIGALRM: rewards run in a process's main thread. An answer that
# takes longer is simply not equal, which is cheaper than the pool killing a worker over it. A machine that stalled may
# be the reason: no cache keeps what came of a timeout (a BaseException), and a reference's is a failure.
_TIMEOUT_S = 3
T = TypeVar("T")
_MATHEMATICS = re.compile(r"[\\$^=_{}()+*/<>]")
_MARKS = ("$", r"\(", r"\[", r"\boxed")


def math_reward(config: RewardConfig) -> Scorer:
    """1 if the answer equals a reference as mathematics (1/2 = 0.5 = \\frac{1}{2}), else 0.

    Raises ValueError for a prompt without a reference, with one in which there is nothing to compare, or with one that
    is not read in time.
    """
    pattern = compile_pattern(config.pattern)

    def score(prompt: Prompt, sample: Sample) -> float:
        references = [reference for reference in references_of(prompt) if is_comparable(reference)]
        if not references:
            raise ValueError(f"the reference answer {prompt.answer!r} of {prompt.dataset_id!r} cannot be parsed")
        answer = extract_answer(pattern, sample.text)
        if not answer:
            return 0.0
        checks = (partial(_equal_in_time, reference, answer, pattern is not None) for reference in references)
        return float(_any(checks, ValueError))

    return score


def _any(checks: Iterable[Callable[[], bool]], late: type[BaseException]) -> bool:
    """Whether any check holds. Raises the last error `late` of one where none does."""
    raised: BaseException | None = None
    for check in checks:
        try:
            if check():
                return True
        except late as error:  # another one may hold
            raised = error
    if raised is not None:
        raise raised
    return False


def _equal_in_time(reference: str, text: str, is_extracted: bool) -> bool:
    try:
        return _equal(reference, text, is_extracted)
    except TimeoutException:
        return False


def _equal(reference: str, text: str, is_extracted: bool) -> bool:
    """Whether the two agree as text, as a number among words, or as math-verify reads them.

    A text that was not extracted may be a whole response: its conclusion is compared; where that is words or reasoning,
    the number of the last clause, or what math-verify finds in it. Each response has one value.
    """
    if is_extracted:
        return _is_same(reference, text)
    text = text.rpartition("</think>")[2].strip() or text
    answer, source = conclusion(text)
    if not source:
        return _is_same(reference, answer)
    if _is_same_text(plain_answer(reference), plain_answer(answer)):
        return True
    if answer and (disagree(reference, answer) or contradicts_itself(plain_answer(answer))):
        return False
    gold, found = plain_answer(reference), plain(source)
    number = quantity(gold)
    return _verified(_golds(gold, number), _amounts(found, number) or _read(found), decimals(number))


# The answers to one prompt are often the same.
@lru_cache(maxsize=4096)
def _is_same(reference: str, answer: str) -> bool:
    gold, found = plain_answer(reference), plain_answer(answer)
    if _is_same_text(gold, found):
        return True
    if contradicts_itself(found) or disagree(reference, answer):
        return False
    number = quantity(gold)
    amounts, places = _amounts(found, number), decimals(number)
    if number is not None and amounts and _names_another(found, places):
        return False
    as_numbers = partial(_verified, _of_reference(_parsed_number, number), amounts, places)
    return _any(
        (as_numbers, lambda: _verified(_golds(gold, number), _parsed(_marked(found)) + amounts, places)),
        TimeoutException,
    )


def _is_same_text(gold: str, found: str) -> bool:
    letter = choice(gold)
    return _folded(gold) == _folded(found) or (letter is not None and letter == choice(found))


def _names_another(found: str, places: int) -> bool:
    """Whether math-verify reads another number in an answer than in its last clause: "it is $5$, that is 7".

    1/3 is no other number than 0.33.
    """
    clause = last_clause(found)
    if clause == found:
        return False
    shown = len((quantity(clause) or "").partition(".")[2]) or places
    numbers = tuple(value for value in _parsed(_marked(found)) if getattr(value, "is_number", False))
    of_clause = _parsed(_marked(clause)) + _amounts(clause, None)
    return bool(numbers) and not _verified(numbers, of_clause, min(places, shown))


def _golds(gold: str, number: str | None) -> tuple[Any, ...]:
    as_number = _of_reference(_parsed_number, number) if number != gold else ()
    return _of_reference(_parsed, _marked(gold)) + as_number


def _of_reference(parsed: Callable[[T], tuple[Any, ...]], text: T) -> tuple[Any, ...]:
    """What is `parsed` of a reference. Raises ValueError in place of math-verify's timeout."""
    try:
        return parsed(text)
    except TimeoutException:
        raise ValueError(f"the reference {text!r} was not read within {_TIMEOUT_S} s") from None


def _amounts(found: str, number: str | None) -> tuple[Any, ...]:
    """The one number of an answer; of its last clause where the reference is the number `number`."""
    return _parsed_number(quantity(found if number is None else last_clause(found)))


def _verified(golds: tuple[Any, ...], found: tuple[Any, ...], places: int) -> bool:
    """Whether any two are equal. Raises TimeoutException where none are and a comparison took too long."""
    return _any((partial(_verified_pair, *pair, places) for pair in product(golds, found)), TimeoutException)


def _verified_pair(gold: Any, found: Any, places: int) -> bool:
    try:
        equal: bool = verify(gold, found, float_rounding=places, timeout_seconds=_TIMEOUT_S, raise_on_error=True)
    except Exception:  # noqa: BLE001  of sympy, of any kind: as math-verify does without `raise_on_error`
        return False
    return equal


# sympy takes milliseconds, and the answers to one prompt share the reference and often each other's value.
@lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[Any, ...]:
    return _read(text)


@lru_cache(maxsize=1024)
def _parsed_number(text: str | None) -> tuple[Any, ...]:
    return () if text is None else _read(text, [ExprExtractionConfig()])


def _read(text: str, *targets: list[ExprExtractionConfig]) -> tuple[Any, ...]:
    """What math-verify reads in `text`; nothing where it or sympy fails. Raises TimeoutException."""
    try:
        return tuple(parse(text, *targets, parsing_timeout=_TIMEOUT_S, raise_on_error=True))
    except Exception:  # noqa: BLE001  of any kind: as math-verify does without `raise_on_error`
        return ()


def _marked(expression: str) -> str:
    """The expression as math-verify recognises it: between dollar signs unless it is marked already."""
    return expression if any(mark in expression for mark in _MARKS) else f"${expression}$"


def _folded(text: str) -> str:
    """Words without regard to case and spaces; mathematics and single letters as they are."""
    words = " ".join(text.split())
    return words.casefold() if len(words) > 1 and not _MATHEMATICS.search(words) else words
