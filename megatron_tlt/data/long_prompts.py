"""Before a run: how many rows of its files are longer than `data.max_prompt_tokens`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from megatron_tlt.config.data import DataSection
from megatron_tlt.data.prompts import encode_row, open_source
from megatron_tlt.data.sources import FileSource, Row, errors_at
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.errors import CheckpointError, ConfigProblem, DataError

_Tools: TypeAlias = Sequence[dict[str, Any]]
_MOST_COUNTED = 4096  # rows of a file: one or two seconds of the tokenizer


@dataclass(frozen=True)
class _Count:
    """Of the rows of the source in section `field`."""

    field: str
    path: str
    size: int
    counted: int
    long: int
    shortest: int  # tokens
    longest: int
    refused: str | None = None  # why the chat template or the tokenizer refuses a row

    @property
    def text(self) -> str:
        part = f"{self.size}" if self.counted == self.size else f"the first {self.counted} of {self.size}"
        return f"{self.long} of {part} rows"


def long_prompt_problems(data: DataSection, tokenizer: HFTokenizer | None, tools: _Tools = ()) -> list[ConfigProblem]:
    """Rows that cannot be tokenized, files in which no row fits, and any long row with `data.long_prompts: error`.

    Reads the files that are on this machine, if the tokenizer is. `tools`: JSON schemas in the chat template.
    """
    problems = []
    for count in _counts(data, tokenizer, tools):
        if count.refused is not None:
            problems.append(ConfigProblem(f"{count.field}.path", count.path, count.refused))
        elif data.long_prompts == "error" and count.long:
            needed = f"must be >= {count.longest} with data.long_prompts = error"
            allowed = f"{needed}: {count.text} of {count.path} are longer"
            problems.append(ConfigProblem("data.max_prompt_tokens", data.max_prompt_tokens, allowed))
        elif data.long_prompts == "drop" and count.long == count.size:
            allowed = f"must be >= {count.shortest}: all {count.size} rows of {count.path} are longer"
            problems.append(ConfigProblem("data.max_prompt_tokens", data.max_prompt_tokens, allowed))
    return problems


def long_prompt_warnings(data: DataSection, tokenizer: HFTokenizer | None, tools: _Tools = ()) -> list[str]:
    """A line for each file of which rows are dropped or cut. Reads as `long_prompt_problems` does."""
    fate = "cut at their beginning" if data.long_prompts == "cut_left" else "dropped"
    return [
        f"{count.field}.path = {count.path}: {count.text} have more than data.max_prompt_tokens = "
        f"{data.max_prompt_tokens} tokens (the longest has {count.longest}) and are {fate} (data.long_prompts)"
        for count in _counts(data, tokenizer, tools)
        if count.long
    ]


def _counts(data: DataSection, tokenizer: HFTokenizer | None, tools: _Tools) -> Iterator[_Count]:
    for field, config in data.sources:
        if tokenizer is None or not config.is_here:
            continue
        chat = data.chat_template and tokenizer.has_chat_template
        try:
            source = open_source(config, field, 0, data.system_prompt)
            assert isinstance(source, FileSource)
            rendered = chat, data.system_prompt, json.dumps(tools)
            count = _count(field, str(config.path), source, tokenizer, *rendered, data.max_prompt_tokens)
        except (CheckpointError, DataError, re.error):  # named where templates, files and patterns are checked
            continue
        yield count


@lru_cache(maxsize=2)  # problems and warnings come from one count
def _count(
    field: str,
    path: str,
    source: FileSource,
    tokenizer: HFTokenizer,
    chat: bool,
    system: str | None,
    tools_json: str,
    most: int,
) -> _Count:
    lengths: list[int] = []
    refused, tools = None, json.loads(tools_json)
    for row in _rows_to_encode(source, tokenizer.tokens_beyond):
        try:
            with errors_at(row.place):
                lengths.append(len(encode_row(tokenizer, row, chat, system, tools)))
        except DataError as error:
            refused = refused or str(error)
    long = sum(length > most for length in lengths)
    return _Count(
        field, path, source.size, len(lengths), long, min(lengths, default=0), max(lengths, default=0), refused
    )


def _rows_to_encode(source: FileSource, tokens_beyond: list[str]) -> Iterator[Row]:
    """The first rows, and any behind them with the text of a token that the model lacks."""
    for index in range(source.size if tokens_beyond else min(source.size, _MOST_COUNTED)):
        row = source.row(index)
        if index < _MOST_COUNTED or any(token in str(row.messages or row.prompt) for token in tokens_beyond):
            yield row
