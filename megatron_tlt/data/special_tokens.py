"""Special tokens in texts that never contain them: responses are decoded without special tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from re import _constants as codes  # type: ignore[attr-defined]  # the parser of `re` has no public name
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from megatron_tlt.errors import ConfigProblem

_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)


def stop_problems(field: str, stops: Sequence[str], special: Collection[str]) -> Iterator[ConfigProblem]:
    """Stop strings that no response contains: those with a special token and other text."""
    for stop in stops:
        token = max((token for token in special if token in stop), key=len, default=None)
        if token is not None and stop != token:
            allowed = f"has the special token {token!r}, which texts of responses lack: use {token!r} alone, or none"
            yield ConfigProblem(field, stop, allowed)


def pattern_problem(field: str, pattern: str, special: Collection[str]) -> ConfigProblem | None:
    """A pattern that no response matches, for each match needs a special token; none for what is no pattern."""
    try:
        needed = [*_needed(_parser.parse(pattern))]
    except re.error:
        return None
    token = max((token for token in special for text in needed if token in text), key=len, default=None)
    if token is None:
        return None
    allowed = f"needs the special token {token!r}, which texts of responses lack, so it never matches: leave it out"
    return ConfigProblem(field, pattern, allowed)


def _needed(parsed: Any) -> Iterator[str]:
    """Texts that every match of a parsed pattern has: its literals in a row outside of alternatives."""
    row = ""
    for code, argument in parsed:
        if code is codes.LITERAL:
            row += chr(argument)
            continue
        if code in (codes.SUBPATTERN, codes.ASSERT) or (code in _REPEATS and argument[0] > 0):
            yield from _needed(argument[-1])
        yield row
        row = ""
    yield row
