"""Finished responses of another run or program, from files, to train a drafter on.

A line of a JSONL file has a prompt and a response, each as text or as token ids, which are taken where both are there:

    prompt      "prompt_token_ids", else the column `data.train.prompt_field` (text or chat messages, into the chat
                template as training prompts are)
    response    "token_ids", else "response" (text; the tokens that end a turn are added unless "finish_reason" is not
                "stop")
    or          "messages" that end with the assistant's, with tools' between (`completions.py`)
    optional    "given": [[begin, end], ...], spans of the response that an environment wrote

A run directory has such lines in `responses/`, if `observe.save_responses` was on. Legend: L tokens of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_tlt.data.completions import RecordTokens, is_conversation, read_conversation
from megatron_tlt.data.fields import (
    TOOLS,
    check_not_read,
    check_text,
    checked_prompt,
    checked_tools,
    columns_hint,
    field_of,
)
from megatron_tlt.data.json_files import read_json
from megatron_tlt.data.sources import errors_at
from megatron_tlt.errors import DataError
from megatron_tlt.observe.jsonl import JsonRow, rows_from_end
from megatron_tlt.observe.rollouts import RESPONSES_DIR
from megatron_tlt.types import Span, Trajectory

if TYPE_CHECKING:
    from megatron_tlt.config.root import Config
    from megatron_tlt.data.tokenizer import HFTokenizer

_PlacedRow = tuple[str, JsonRow]  # behind the place that errors name
_PROMPT_IDS, _RESPONSE_IDS, _RESPONSE = "prompt_token_ids", "token_ids", "response"


def read_responses(config: Config, path: Path, tokenizer: HFTokenizer, vocab_size: int, most: int) -> list[Trajectory]:
    """The last `most` responses in `path`, a JSONL file or a run directory; `prompt_id` counts them.

    Log-probs are zeros. Raises DataError that names file, line and field, also for more than `model.max_context`
    tokens.
    """
    rows = _rows_of_run(path, most) if path.is_dir() else _rows_of_file(path, most)
    data = config.data
    limit = config.model.max_context
    encoder = RecordTokens(tokenizer, limit, chat=data.chat_template, system=data.system_prompt)
    found = [_trajectory(number, config, row, where, encoder, vocab_size) for number, (where, row) in enumerate(rows)]
    if not found:
        raise DataError(f"{path}: no responses")
    return found


def _rows_of_file(path: Path, most: int) -> list[_PlacedRow]:
    records, numbers = read_json(path, last=most)
    return [(f"{path}:{number}", record) for record, number in zip(records, numbers, strict=True)]


def _rows_of_run(run_dir: Path, most: int) -> list[_PlacedRow]:
    """The last `most` rows in the order of steps, without lines that a crash tore. Raises DataError."""
    files = sorted((run_dir / RESPONSES_DIR).glob("*.jsonl"))
    if not files:
        raise DataError(
            f"{run_dir}: has no {RESPONSES_DIR}/*.jsonl, which a run writes with observe.save_responses=true "
            "(rollouts.jsonl has statistics only; samples.jsonl, a few responses of a step, can be named itself)"
        )
    rows: list[_PlacedRow] = []
    for file in files:
        oldest = _step(rows[0]) if len(rows) == most else 0
        rows = sorted([*rows, *_last_rows(file, most, oldest)], key=_step)[-most:]
    return rows


def _last_rows(file: Path, most: int, oldest: int) -> list[_PlacedRow]:
    """At most `most` rows of steps from `oldest` on, in order. Reads no others: in a file steps ascend."""
    rows = ((f"{file}: row {n} from the end", row) for n, (_, row) in enumerate(rows_from_end(file), 1))
    return [*takewhile(lambda placed: _step(placed) >= oldest, islice(rows, most))][::-1]


def _step(placed: _PlacedRow) -> int:
    step: int = placed[1].get("step", 0)
    return step


def _trajectory(
    number: int, config: Config, row: Mapping[str, Any], where: str, encoder: RecordTokens, vocab_size: int
) -> Trajectory:
    prompt, response, spans = _tokens(config, row, where, encoder)
    for name, ids in ((_PROMPT_IDS, prompt), (_RESPONSE_IDS, response)):
        if not len(ids):
            raise DataError(f"{where}: field {name!r} has no tokens")
        if min(ids) < 0 or max(ids) >= vocab_size:
            found = f"{min(ids)} to {max(ids)}"
            raise DataError(f"{where}: field {name!r} has ids {found}, the model has 0 to {vocab_size - 1}")
    length, limit = len(prompt) + len(response), config.model.max_context
    if length > limit:
        raise DataError(f"{where}: {length} tokens, model.max_context allows {limit}")
    tokens = np.array([*prompt, *response], np.int32)
    given = spans or _given(row, len(response), where)
    return Trajectory(number, 0, tokens, np.zeros(len(response), np.float32), given)


def _given(row: Mapping[str, Any], length: int, where: str) -> tuple[Span, ...]:
    spans: Any = row.get("given", [])
    last = 0
    for span in spans if isinstance(spans, list) else [spans]:
        is_pair = isinstance(span, list) and len(span) == 2 and all(type(i) is int for i in span)
        if not is_pair or not last <= span[0] < span[1] <= length:
            raise DataError(f"{where}: field 'given' must be ascending [begin, end] within {length} response tokens")
        last = span[1]
    return tuple((begin, end) for begin, end in spans)


def _tokens(
    config: Config, row: Mapping[str, Any], where: str, encoder: RecordTokens
) -> tuple[Sequence[int], Sequence[int], tuple[Span, ...]]:
    """Token ids of prompt and response, and the spans that the tools of a conversation wrote."""
    prompt_field = config.data.train.prompt_field
    text: Any = row.get(_RESPONSE)
    prompt: Any = field_of(row, prompt_field)
    if _PROMPT_IDS not in row and is_conversation(row, prompt_field, _RESPONSE, _RESPONSE_IDS):
        record = read_conversation(row, where, config.data.system_prompt)
        with errors_at(where):
            return encoder.encode(record)
    if _PROMPT_IDS in row:
        prompt_ids: Sequence[int] = _ids(row, _PROMPT_IDS, where)
    elif prompt is None:
        hint = columns_hint(row, prompt_field)
        raise DataError(f"{where}: field {prompt_field!r} or {_PROMPT_IDS!r} is missing{hint}")
    else:
        prompt = checked_prompt(prompt, prompt_field, where, _RESPONSE_IDS if _RESPONSE_IDS in row else _RESPONSE)
        check_not_read(row, prompt_field, prompt, where, config.data.system_prompt)
        with errors_at(where):
            prompt_ids = encoder.prompt(prompt, checked_tools(row.get(TOOLS), where))
    if _RESPONSE_IDS in row:
        return prompt_ids, _ids(row, _RESPONSE_IDS, where), ()
    if not isinstance(text, str):
        hint = columns_hint(row, _RESPONSE) if text is None else f", found {type(text).__name__}"
        raise DataError(f"{where}: field {_RESPONSE!r} must be a string, or {_RESPONSE_IDS!r} a list of ids{hint}")
    check_text(text, _RESPONSE, where)
    with errors_at(where):
        response = encoder.drawn(text, prompt_ids, ends=row.get("finish_reason", "stop") == "stop")
    return prompt_ids, response, ()


def _ids(row: Mapping[str, Any], name: str, where: str) -> list[int]:
    value = row[name]
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise DataError(f"{where}: field {name!r} must be a list of integers")
    return value
