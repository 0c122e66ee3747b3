"""Records for supervised fine-tuning: a prompt and a completion, or a conversation with tools.

    messages    system, user, ..., user | assistant   tool   assistant
                prompt                  | learned     given  learned

A conversation's response begins with the first message of the assistant after the last one of the user: earlier turns
are context. A tool's message becomes the same tokens as an environment's observation in a rollout, and has no loss.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from megatron_tlt.config.root import SftSection
from megatron_tlt.data.chat import THOUGHTS, Messages, text_of
from megatron_tlt.data.fields import (
    TOOLS,
    check_not_read,
    check_text,
    checked_messages,
    checked_prompt,
    checked_tools,
    field_of,
    without_absent,
)
from megatron_tlt.data.hashing import stamp
from megatron_tlt.data.json_files import read_json
from megatron_tlt.data.prompts import encode_prompt
from megatron_tlt.data.sources import errors_at, read_dataset
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.data.turn_form import continued, read_turn_form
from megatron_tlt.data.turns import TurnTokens
from megatron_tlt.errors import ConfigError, DataError
from megatron_tlt.types import Span, TrainSequence, Trajectory

EncodedRecord: TypeAlias = tuple[list[int], list[int], tuple[Span, ...]]  # prompt, response, spans that are given
MESSAGES = "messages"
# Fields of a message by which other programs learn it or not, with the value that says yes. Of `mask` none is clear.
_MARKS = {"weight": 1, "train": True, "training": True, "loss": True, "mask": None}


@dataclass(frozen=True, slots=True)
class Completion:
    """A record. `turns`: texts of the assistant and of tools in turns, from the assistant's to the assistant's."""

    prompt: str | Messages
    turns: tuple[str, ...]
    tools: tuple[dict[str, Any], ...] = ()  # JSON schemas, for the chat template
    earlier: int = 0  # turns of the assistant in a conversation before its last message of the user: context

    @property
    def is_blank(self) -> bool:
        """Whether a turn to learn has no text: fine-tuning leaves the record out."""
        return not all(text.strip() for text in self.turns[::2])


def read_completions(sft: SftSection, path: Path, split: str) -> tuple[tuple[Completion, ...], tuple[str, ...]]:
    """Every record of a JSONL file or a data set's split, blank ones too, and the records' places.

    Checks, warnings and the training share one read, until `forget_completions`. Raises DataError naming file and
    record, also where there is no record, or none with text to learn.
    """
    fields = sft.prompt_field, sft.completion_field
    return _read_completions(path, sft.subset, split, *fields, stamp([path, *path.rglob("*")]))


def forget_completions() -> None:
    """Frees the records that `read_completions` keeps: a training needs their tokens only."""
    _read_completions.cache_clear()


@lru_cache(maxsize=2)  # training and held-out records
def _read_completions(
    path: Path, subset: str | None, split: str, prompt_field: str, completion_field: str, _stamp: Hashable
) -> tuple[tuple[Completion, ...], tuple[str, ...]]:
    records: Iterable[Mapping[str, Any]]
    if path.is_dir():
        rows, where = read_dataset(path, subset, split, (prompt_field, completion_field))
        types = getattr(rows, "features", {})
        records = ({name: without_absent(value, types.get(name)) for name, value in row.items()} for row in rows)
        places = tuple(map(where, range(len(rows))))
    else:
        records, numbers = read_json(path)
        places = tuple(f"{path}:{number}" for number in numbers)
    if not places:
        raise DataError(f"{path}: no records")
    pairs = zip(records, places, strict=True)
    found = tuple(_completion(prompt_field, completion_field, record, place) for record, place in pairs)
    if all(row.is_blank for row in found):
        columns = f"field {completion_field!r}, or the assistant's turns in {MESSAGES!r}"
        raise DataError(f"{path}: none of its {len(found)} records has text to learn ({columns})")
    return found, places


def encoded_records(
    sft: SftSection, path: Path, split: str, tokenizer: HFTokenizer, max_context: int
) -> Iterator[tuple[int, str, EncodedRecord]]:
    """(number from 1, place, tokens) of every record that is not blank, encoded as `RecordTokens` does.

    `sft.chat_template` wraps prompts in the tokenizer's chat template if it has one. Raises DataError naming file and
    record.
    """
    encoder = RecordTokens(tokenizer, max_context, chat=sft.chat_template)
    for number, (row, where) in enumerate(zip(*read_completions(sft, path, split), strict=True), start=1):
        if row.is_blank:
            continue
        if not (isinstance(row.prompt, str) or encoder.chat):
            needed = "sft.chat_template and a tokenizer with a chat template"
            raise DataError(f"{where}: chat messages need {needed}")
        with errors_at(where):
            tokens = encoder.encode(row)
        yield number, where, tokens


def read_sequences(
    sft: SftSection, path: Path, split: str, tokenizer: HFTokenizer, max_context: int, most: int | None = None
) -> tuple[list[TrainSequence], str | None]:
    """The sequences of the records with text to learn and at most `max_context` tokens, and a line about longer ones,
    which are left out. A sequence's `prompt_id` is the record's number, from 1.

    `most`: of the first records only. Raises DataError naming file and record for one that cannot be encoded, and where
    all are longer, in a file of fewer than `most`.
    """
    sequences: list[TrainSequence] = []
    long: list[tuple[int, str]] = []  # tokens and place
    records = islice(encoded_records(sft, path, split, tokenizer, max_context), most)
    for number, where, (prompt, response, given) in records:
        tokens = [*prompt, *response]
        if len(tokens) > max_context:
            long.append((len(tokens), where))
            continue
        unknown = np.zeros(len(response), np.float32)
        sequences.append(TrainSequence.of(Trajectory(number, 0, np.array(tokens, np.int32), unknown, given)))
    size = len(sequences) + len(long)
    limit = f"more than model.max_context = {max_context} tokens"
    if len(long) == size != most:
        raise DataError(f"{path}: all {size} records have {limit} (the shortest, {min(long)[1]}, has {min(long)[0]})")
    if not long:
        return sequences, None
    longest = f"the longest has {max(long)[0]}, the first is {long[0][1]}"
    of = f"{'the first ' * (size == most)}{size}"
    return sequences, f"{path}: {len(long)} of {of} records have {limit} and are left out ({longest})"


def _completion(prompt_field: str, completion_field: str, record: Mapping[str, Any], where: str) -> Completion:
    if is_conversation(record, prompt_field, completion_field):
        return read_conversation(record, where)
    value, completion = field_of(record, prompt_field), field_of(record, completion_field)
    if isinstance(value, list) and isinstance(completion, list):  # messages in both, as TRL has them
        if not completion:  # no text to learn
            return Completion(checked_messages(value, prompt_field, where), ("",))
        row = read_conversation({**record, MESSAGES: [*value, *completion]}, where)
        if len(row.prompt) != len(value):
            allowed = f"must have all messages up to the user's last one, and {completion_field!r} those behind it"
            raise DataError(f"{where}: field {prompt_field!r} {allowed}, or join them in {MESSAGES!r}")
        return row
    if not isinstance(completion, str) or value is None:
        missing = prompt_field if value is None else completion_field
        has_other = prompt_field != MESSAGES and record.get(MESSAGES) is not None
        hint = f"; sft.prompt_field={MESSAGES} takes {MESSAGES!r}" if has_other else ""
        found = f"keys {sorted(record)}" if field_of(record, missing) is None else type(completion).__name__
        raise DataError(f"{where}: field {missing!r} must be a string, found {found}{hint}")
    check_text(completion, completion_field, where)
    prompt = checked_prompt(value, prompt_field, where, completion_field)
    check_not_read(record, prompt_field, prompt, where)
    return Completion(prompt, (completion,), checked_tools(record.get(TOOLS), where))


def is_conversation(record: Mapping[str, Any], prompt_field: str, *responses: str) -> bool:
    """Whether the column `messages` has prompt and response: beside no prompt, or as `prompt_field` beside none of the
    columns `responses`.
    """
    is_prompt = prompt_field == MESSAGES and not any(field_of(record, name) is not None for name in responses)
    return record.get(MESSAGES) is not None and (is_prompt or field_of(record, prompt_field) is None)


def read_conversation(record: Mapping[str, Any], where: str, system: str | None = None) -> Completion:
    """The column `messages`, and `tools` if it is there; messages of tools in a row are one turn. `system`: the run's
    system message.

    Raises DataError, also for a turn to learn that its fields say is not learned, and for an earlier one that they say
    is.
    """
    messages = checked_messages(record[MESSAGES], MESSAGES, where)
    roles = [message["role"] for message in messages]
    if roles[-1] != "assistant":
        raise DataError(f"{where}: field {MESSAGES!r} must end with a message of the assistant")
    last_user = max(i for i, role in enumerate(roles) if role == "user")
    begin = roles.index("assistant", last_user)
    check_not_read(record, MESSAGES, messages, where, system)
    _check_learned(messages, begin, where)
    parts = groupby(messages[begin:], lambda m: m["role"])
    turns = [(role, [text_of(message["content"]) for message in part]) for role, part in parts]
    if any(role not in ("assistant", "tool") or (role == "assistant" and len(texts) > 1) for role, texts in turns):
        found = ", ".join(roles[begin:])
        allowed = f"after the last user's the assistant and tools must take turns, found {found}"
        raise DataError(f"{where}: field {MESSAGES!r}: {allowed}")
    texts = tuple("\n".join(texts) for _, texts in turns)
    earlier = roles[:begin].count("assistant")
    return Completion(messages[:begin], texts, checked_tools(record.get(TOOLS), where), earlier)


def _check_learned(messages: Messages, begin: int, where: str) -> None:
    """The marks of the turns that are context, and the fields of those to learn, whose texts are tokenized as they
    stand. Raises DataError.
    """
    for index, message in enumerate(messages[:begin]):
        marked = (name for name, yes in _MARKS.items() if yes is not None and message.get(name))
        if message["role"] == "assistant" and (name := next(marked, None)) is not None:
            found = f"{where}: field {MESSAGES!r}: message {index} has {name} {json.dumps(message[name])}"
            raise DataError(f"{found}: it is context, before the user's last one; a record that ends with it learns it")
    for index, message in enumerate(messages[begin:], start=begin):
        place = f"{where}: field {MESSAGES!r}: message {index} has"
        for name in ("tool_calls", *THOUGHTS):
            if message.get(name):
                raise DataError(f"{place} {name}: in a turn to learn they must be in content, as the model writes them")
        if message["role"] != "assistant":
            continue
        for name, yes in _MARKS.items():
            if message.get(name, yes) != yes:
                allowed = "all of the assistant's after the user's last one are learned, whole"
                raise DataError(f"{place} {name} {json.dumps(message[name])}: {allowed}")


class RecordTokens:
    """Tokenizes records: a response's tokens are those of the rendered conversation behind its prompt."""

    def __init__(self, tokenizer: HFTokenizer, max_tokens: int, *, chat: bool, system: str | None = None):
        """`max_tokens`: of a tool's message; the rest of it is cut off. `chat`, `system`: see `encode_prompt`."""
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self.chat, self._system = chat and tokenizer.has_chat_template, system
        self._form = read_turn_form(tokenizer, chat)
        self._turn_tokens: dict[str, TurnTokens] = {}

    def prompt(self, prompt: str | Messages, tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Token ids of a prompt. Raises DataError."""
        return encode_prompt(self._tokenizer, prompt, self.chat, self._system, tools)

    def encode(self, row: Completion) -> EncodedRecord:
        """(prompt, response, the response's spans that are given). Each turn of the assistant ends as the chat template
        ends it.

        Raises DataError, also where the chat template cannot continue a response.
        """
        prompt, given, response = self.prompt(row.prompt, row.tools), [], []
        opening = self._opening(prompt)
        for text, observation in zip(row.turns[::2], row.turns[1::2], strict=False):
            between = self._tokens_between(row.tools)
            response += self._turn(text, opening, between.head("tool"))
            begin = len(response)
            response += between.given(observation, "tool", response)
            given.append((begin, len(response)))
            opening = between.opening("tool")
        return prompt, [*response, *self._turn(row.turns[-1], opening, self._form.head)], tuple(given)

    def drawn(self, text: str, prompt: Sequence[int], ends: bool) -> list[int]:
        """Token ids of a response that a model has drawn. `ends`: with the tokens that end a turn. Raises DataError."""
        text = continued(text, self._form.opening)
        if not (self._form.head.strip() or text.startswith(self._form.head)):  # white space, which texts lose
            text = self._form.head + text
        ids = self._tokenizer.encode_behind(self._opening(prompt), text)
        return self._ended(ids) if ends else ids

    def _turn(self, text: str, opening: str, head: str) -> list[int]:
        return self._ended(self._tokenizer.encode_behind(opening, self._form.rendered(text, head)))

    def _ended(self, ids: list[int]) -> list[int]:
        """The tokens of a turn's text with those that end it, unless the text ends with the last of these itself."""
        end = self._form.end
        return ids if ids[-1:] == [end[-1]] else [*ids, *end]

    def _opening(self, prompt: Sequence[int]) -> str:
        """The text before a response: in a chat template it ends alike for every prompt."""
        return self._form.opening if self.chat else self._tokenizer.decode(prompt)

    def _tokens_between(self, tools: Sequence[dict[str, Any]]) -> TurnTokens:
        key = json.dumps(tools)
        if key not in self._turn_tokens:  # it renders conversations to check the template
            most = self._max_tokens
            try:
                turns = TurnTokens(
                    self._tokenizer,
                    chat=self.chat,
                    max_observation_tokens=most,
                    tools=tools,
                    roles=("tool",),
                    keep_history=True,  # as RL with env.rewritten_history: keep, whose stream this is
                    ends=self._form.end[-1:],
                )
            except ConfigError as error:
                why = "; ".join(problem.allowed for problem in error.problems)
                raise DataError(f"field {MESSAGES!r}: {why}") from error
            self._turn_tokens[key] = turns
        return self._turn_tokens[key]
