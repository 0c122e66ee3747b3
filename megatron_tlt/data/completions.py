"""Records for supervised fine-tuning: a prompt and a completion, or a conversation with tools.

    messages    system, user, ..., user | assistant   tool   assistant
                prompt                  | learned     given  learned

A conversation's response begins with the first message of the assistant after the last one of the user: earlier turns
are context. A tool's message becomes the same tokens as an environment's observation in a rollout, and has no loss.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_tlt.config.root import SftSection
from megatron_tlt.data.chat import THOUGHTS, Messages, text_of
from megatron_tlt.data.sources import checked_messages, checked_prompt, field_of, read_dataset, read_jsonl
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.data.turns import TurnTokens
from megatron_tlt.errors import ConfigError, DataError
from megatron_tlt.types import Span

MESSAGES, _TOOLS = "messages", "tools"


@dataclass(frozen=True, slots=True)
class Completion:
    """A record. `turns`: texts of the assistant and of tools in turns, from the assistant's to the assistant's."""

    prompt: str | Messages
    turns: tuple[str, ...]
    tools: tuple[dict[str, Any], ...] = ()  # JSON schemas, for the chat template


def read_completions(sft: SftSection, path: Path, split: str) -> tuple[list[Completion], list[int]]:
    """Every record of a JSONL file or a data set's split, and the records' numbers.

    Raises DataError naming file and record, also where there is no record.
    """
    if path.is_dir():
        records = read_dataset(path, sft.subset, split)
        numbers = [*range(len(records))]
    else:
        records, numbers = read_jsonl(path)
    if not len(records):
        raise DataError(f"{path}: no records")
    return [_completion(sft, r, f"{path}:{n}") for r, n in zip(records, numbers, strict=True)], numbers


def _completion(sft: SftSection, record: Mapping[str, Any], where: str) -> Completion:
    if MESSAGES in record and sft.prompt_field not in record:
        return read_conversation(record, where)
    prompt, completion = field_of(record, sft.prompt_field), field_of(record, sft.completion_field)
    if not isinstance(completion, str) or prompt is None:
        missing = sft.prompt_field if prompt is None else sft.completion_field
        raise DataError(f"{where}: field {missing!r} must be a string, found keys {sorted(record)}")
    return Completion(checked_prompt(prompt, sft.prompt_field, where), (completion,))


def read_conversation(record: Mapping[str, Any], where: str) -> Completion:
    """The column `messages`, and `tools` if it is there; messages of tools in a row are one turn. Raises DataError."""
    messages = checked_messages(record[MESSAGES], MESSAGES, where)
    roles = [message["role"] for message in messages]
    if roles[-1] != "assistant":
        raise DataError(f"{where}: field {MESSAGES!r} must end with a message of the assistant")
    last_user = max(i for i, role in enumerate(roles) if role == "user")
    begin = roles.index("assistant", last_user)
    _check_learned(messages, begin, where)
    parts = groupby(messages[begin:], lambda m: m["role"])
    turns = [(role, [text_of(message["content"]) for message in part]) for role, part in parts]
    if any(role not in ("assistant", "tool") or (role == "assistant" and len(texts) > 1) for role, texts in turns):
        found = ", ".join(roles[begin:])
        allowed = f"after the last user's the assistant and tools must take turns, found {found}"
        raise DataError(f"{where}: field {MESSAGES!r}: {allowed}")
    texts = tuple("\n".join(texts) for _, texts in turns)
    return Completion(messages[:begin], texts, _tools(record.get(_TOOLS), where))


def _check_learned(messages: Messages, begin: int, where: str) -> None:
    """The fields of the turns to learn, whose texts are tokenized as they stand. Raises DataError."""
    for index in range(begin, len(messages)):
        for name in ("tool_calls", *THOUGHTS):
            if messages[index].get(name):
                allowed = "in a turn to learn they must be in content, as the model writes them"
                raise DataError(f"{where}: field {MESSAGES!r}: message {index} has {name}: {allowed}")


def _tools(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    """The column `tools`. Raises DataError."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(map(_is_tool, value)):
        form = '{"type": "function", "function": {"name": .., ..}}'
        raise DataError(f"{where}: field {_TOOLS!r} must be a list of {form}")
    return tuple(value)


def _is_tool(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


class ResponseTokens:
    """Tokenizes the turns of responses."""

    def __init__(self, tokenizer: HFTokenizer, max_tokens: int):
        """`max_tokens`: of a tool's message; the rest of it is cut off."""
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._turn_tokens: dict[str, TurnTokens] = {}

    def encode(self, row: Completion, where: str) -> tuple[list[int], tuple[Span, ...]]:
        """(response, its spans that are given). The end-of-sequence token ends each turn of the assistant.

        Raises DataError where the tokenizer's chat template cannot continue a response.
        """
        response, given = self._turn(row.turns[0]), []
        for observation, text in zip(row.turns[1::2], row.turns[2::2], strict=True):
            begin = len(response)
            response += self._tokens_between(row.tools, where).given(observation, "tool", response)
            given.append((begin, len(response)))
            response += self._turn(text)
        return response, tuple(given)

    def _turn(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text), self._tokenizer.eos_token_ids[0]]

    def _tokens_between(self, tools: Sequence[dict[str, Any]], where: str) -> TurnTokens:
        key = json.dumps(tools)
        if key not in self._turn_tokens:  # it renders conversations to check the template
            most = self._max_tokens
            try:
                turns = TurnTokens(
                    self._tokenizer, chat=True, max_observation_tokens=most, tools=tools, roles=("tool",)
                )
            except ConfigError as error:
                why = "; ".join(problem.allowed for problem in error.problems)
                raise DataError(f"{where}: field {MESSAGES!r}: {why}") from error
            self._turn_tokens[key] = turns
        return self._turn_tokens[key]
