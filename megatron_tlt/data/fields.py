"""Values of a row's columns: prompts, messages and reference answers, as they are checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np

from megatron_tlt.config.checks.texts import check_texts
from megatron_tlt.data.chat import Messages, as_messages, as_prompt, has_system, text_of
from megatron_tlt.data.json_files import JsonNumber
from megatron_tlt.errors import DataError, did_you_mean
from megatron_tlt.types import Answer

_SYSTEM = ("system", "system_prompt")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_PARTS = {"instruction": ("input", "context")}  # of Alpaca and Dolly: the text that an instruction is about
TOOLS = "tools"  # the column of schemas
_LARGEST_EXPONENT = 400  # beyond it a number keeps its exponent; that of a double is less


def columns_of_prompt(prompt_field: str) -> tuple[str, ...]:
    """Columns beside `prompt_field` that other programs put before a prompt's text, or into it."""
    return (*_SYSTEM, *_MEDIA, *_PARTS.get(prompt_field, ()))


def field_of(record: Mapping[str, Any], name: str | None) -> Any:
    """The value of a column, or of a field of one for a name with dots; None where it is missing, or none is named."""
    if name is None:
        return None
    if name in record:
        return record[name]
    first, _, rest = name.partition(".")
    inner = record.get(first)
    return field_of(inner, rest) if rest and isinstance(inner, Mapping) else None


def without_absent(value: Any, feature: Any) -> Any:
    """A value of a table's column without keys that its row did not have: a struct of Arrow has those of all rows, as
    null.

    `feature`: the column's type in `datasets`; None for JSON, whose own nulls stay, as those of its type `Json` do.
    """
    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        return {key: without_absent(item, feature.get(key)) for key, item in value.items() if item is not None}
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    is_nested = isinstance(inner, (Mapping, list)) or hasattr(inner, "feature")
    if is_nested and isinstance(value, list):
        return [without_absent(item, inner) for item in value]
    return value


def columns_hint(record: Mapping[str, Any], wanted: str) -> str:
    """The columns that there are, and the one whose name is nearest to `wanted`, for an error."""
    if wanted in record:
        return ": it is null"
    hint = did_you_mean(wanted, record) if len(record) > 1 else ""
    return f"; there are {', '.join(map(repr, sorted(record))) or 'none'}{hint}"


def checked_prompt(value: Any, field: str, where: str, response_field: str | None = None) -> str | Messages:
    """A string, or the messages of a chat to respond to, without the response that they end with. Raises DataError.

    `response_field`: the column that has the response: the messages must then have none.
    """
    if isinstance(value, str) and value:
        check_text(value, field, where)
        return value
    if isinstance(value, list):
        messages = checked_messages(value, field, where)
        prompt = as_prompt(messages)
        if response_field is not None and len(prompt) < len(messages):
            allowed = f"must not end with a message of the assistant, for the response is field {response_field!r}"
            raise DataError(f"{where}: field {field!r} {allowed}")
        return prompt
    found = type(value).__name__ if value != "" else "an empty string"
    raise DataError(f"{where}: field {field!r} must be a string or a list of chat messages, found {found}")


def checked_messages(value: Any, field: str, where: str) -> Messages:
    """The messages of a column. Raises DataError."""
    try:
        messages = as_messages(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: field {field!r}: {error}") from error
    check_text(messages, field, where)
    return messages


def check_not_read(
    record: Mapping[str, Any], field: str, prompt: str | Messages, where: str, system: str | None = None
) -> None:
    """Raises DataError for a column beside `prompt`, that of column `field`, that would belong to it: a system message,
    images, videos, audio, the input of an instruction.

    A system message may stand in the first text of the prompt, too, or be the run's `system`, which `with_system` puts
    there.
    """
    for name in _MEDIA:
        if record.get(name):
            raise DataError(f"{where}: field {name!r} is not empty: models read text only (rename it if it is text)")
    for name in _PARTS.get(field, ()):
        text = record.get(name)
        if text.strip() if isinstance(text, str) else text:
            joined = f"join it and {field!r} in one column"
            raise DataError(f"{where}: field {name!r} is not empty and not read: {joined}, or rename it")
    begin = prompt if isinstance(prompt, str) else text_of(prompt[0]["content"])
    added = system if isinstance(prompt, str) or not has_system(prompt) else None
    for name in _SYSTEM:
        text = record.get(name)
        if isinstance(text, str) and text.strip() not in begin and text.strip() != (added or "").strip():
            allowed = (
                "does not reach the model: make it the first message of the prompt, or rename it "
                "(data.system_prompt has one text for all prompts of RL)"
            )
            raise DataError(f"{where}: field {name!r} {allowed}")


def checked_tools(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    """The JSON schemas in the column `tools`, which may be JSON text, as data sets keep them; none for null and for
    empty text. A bare function, {"name": .., ..}, gets the form around it. Raises DataError.
    """
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value) if value.strip() else None
    if value is None:
        return ()
    tools = [*map(_as_tool, value)] if isinstance(value, list) else [None]
    if None in tools:
        form = '{"type": "function", "function": {"name": .., ..}} or {"name": .., ..}'
        raise DataError(f"{where}: field {TOOLS!r} must be a list of {form}; rename it if it has no schemas of tools")
    check_text(tools, TOOLS, where)
    return tuple(tool for tool in tools if tool is not None)


def _as_tool(value: Any) -> dict[str, Any] | None:
    """A tool's schema; None for anything else."""
    if not isinstance(value, dict):
        return None
    if "function" not in value and isinstance(value.get("name"), str):
        bare = {key: item for key, item in value.items() if (key, item) != ("type", "function")}
        return {"type": "function", "function": bare}
    function = value.get("function")
    return value if isinstance(function, dict) and isinstance(function.get("name"), str) else None


def check_text(value: Any, field: str, where: str) -> None:
    """Raises DataError for a lone surrogate in a string, or in a string somewhere in lists and mappings."""
    for problem in check_texts(value, field):
        raise DataError(f"{where}: field {problem.path!r} {problem.allowed}")


def checked_answer(value: Any, field: str, where: str) -> Answer | None:
    """The text of a reference answer, or of a list of acceptable ones; None: there is none. Raises DataError.

    Numbers are spelled as in a JSON file, but without an exponent: 1e-05 is "0.00001", as responses spell it.
    """
    if value is None:
        return None
    try:
        if isinstance(value, list) and not value:
            raise ValueError("an empty list")
        answer = tuple(map(_answer_text, value)) if isinstance(value, list) else _answer_text(value)
    except ValueError as error:
        allowed = "must be a string or a number, true or false, or a list of these that are all acceptable"
        whole = "answer_field: null gives the column to rewards as it is, in metadata"
        raise DataError(f"{where}: field {field!r} {allowed} ({whole}), found {error}") from error
    check_text(answer, field, where)
    return answer


def _answer_text(value: Any) -> str:
    """Raises ValueError that says what was found."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, JsonNumber):
        return _without_exponent(value.text)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float | Decimal | np.floating):
        if not math.isfinite(value):
            raise ValueError(f"{value}, which is no number")
        return _without_exponent(str(value))
    if isinstance(value, date) and not isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, dict):
        raise ValueError(f"an object with {', '.join(map(repr, value))}, of which FIELD.KEY names one")
    raise ValueError("null in it" if value is None else type(value).__name__)


def _without_exponent(text: str) -> str:
    exponent = text.lower().partition("e")[2]
    if not exponent or abs(int(exponent)) > _LARGEST_EXPONENT:
        return text
    return format(Decimal(text), "f")
