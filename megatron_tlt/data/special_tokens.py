"""Special tokens in texts that never contain them: responses are decoded without special tokens.

Read from a tokenizer's files, without `transformers`, whose import takes seconds that `check` does not need.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]  # the parser of `re` has no public name
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from megatron_tlt.config.json_reader import read_object_if_there
from megatron_tlt.errors import ConfigProblem

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)


def special_tokens_of(directory: Path) -> frozenset[str]:
    """The special tokens of a tokenizer's directory. Raises CheckpointError for a file that is not JSON."""
    config = read_object_if_there(directory / "tokenizer_config.json")
    kinds: dict[str, bool] = {}
    added = read_object_if_there(directory / "tokenizer.json").get("added_tokens") or []
    for token in [*added, *(config.get("added_tokens_decoder") or {}).values()]:
        kinds[_text(token)] = bool(token.get("special"))
    named = named_tokens_of(directory)
    texts = {text for text, is_special in kinds.items() if is_special} | {*named.values()}
    for name in _LISTS:
        listed = config.get(name) or []
        texts |= {_text(token) for token in (listed.values() if isinstance(listed, dict) else listed)}
    return frozenset(texts - {""})


def named_tokens_of(directory: Path) -> dict[str, str]:
    """The texts of "bos_token", "eos_token" and so on. Raises CheckpointError for a file that is not JSON."""
    files = ("special_tokens_map.json", "tokenizer_config.json")  # the second wins
    entries = {key: value for file in files for key, value in read_object_if_there(directory / file).items()}
    return {name: _text(entries[name]) for name in _NAMED if entries.get(name) is not None}


def stop_problems(field: str, stops: Sequence[str], special: frozenset[str]) -> Iterator[ConfigProblem]:
    """Stop strings that no response contains: those with a special token and other text."""
    for stop in stops:
        token = max((token for token in special if token in stop), key=len, default=None)
        if token is not None and stop != token:
            allowed = f"has the special token {token!r}, which texts of responses lack: use {token!r} alone, or none"
            yield ConfigProblem(field, stop, allowed)


def pattern_problem(field: str, pattern: str, special: frozenset[str]) -> ConfigProblem | None:
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


def _text(token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""
