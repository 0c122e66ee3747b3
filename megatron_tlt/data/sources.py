"""Finite prompt sources: the records of a file, by number. Nothing is shuffled or tokenized here."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from megatron_tlt.config.data import PromptSourceConfig
from megatron_tlt.data.chat import Messages, form_of, last_user_text
from megatron_tlt.data.dataset_files import (
    DEFAULT_SPLIT,
    Where,
    missing_shards,
    of_text,
    read_dataset_files,
    read_parquet,
    rows_of,
    unread_files,
)
from megatron_tlt.data.fields import (
    TOOLS,
    check_not_read,
    checked_answer,
    checked_prompt,
    checked_tools,
    columns_hint,
    columns_of_prompt,
    field_of,
    without_absent,
)
from megatron_tlt.data.hashing import digest, stamp
from megatron_tlt.data.hub import hub_name
from megatron_tlt.data.json_files import read_json, without_spelling
from megatron_tlt.errors import DataError, no_such_file, shortened
from megatron_tlt.types import Answer

Example: TypeAlias = tuple[str, str | Messages, tuple[dict[str, Any], ...]]
_DEFAULT_ANSWER_FIELD = "answer"
_SAVED = ("state.json", "dataset_dict.json")  # of Dataset.save_to_disk and DatasetDict.save_to_disk
_NARROW = {"float16": np.float16, "float32": np.float32}  # whose decimals are shorter than those of a double
_CHECKED_AT_ONCE = 1000  # rows
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One prompt before tokenization. `metadata` has the source's other columns.

    `messages`: the whole prompt where it is a chat; `prompt` is then its last user message, and `metadata` has the
    messages under the name of their column.
    """

    dataset_id: str
    prompt: str
    answer: Answer | None
    task: str
    metadata: dict[str, Any]
    messages: Messages | None = None
    place: str = ""
    """File and line or number, for errors."""
    token_ids: tuple[int, ...] | None = None
    """The prompt itself, in place of `prompt`."""
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas, for the chat template."""

    def with_opening(self, text: str) -> Row:
        """The row with a text of the environment at its end. Raises DataError where the prompt is no text."""
        if self.token_ids is not None:
            raise DataError(f"{self.place}: the environment's text cannot be added to token_ids: give a prompt")
        prompt = f"{self.prompt}\n\n{text}" if self.prompt else text
        if self.messages is None:
            return replace(self, prompt=prompt)
        last = max(i for i, message in enumerate(self.messages) if message["role"] == "user")
        messages = [*self.messages]
        messages[last] = {**messages[last], "content": prompt}
        return replace(self, prompt=prompt, messages=tuple(messages))


class Source(Protocol):
    """Rows by number. A finite source has `size` rows, an infinite one None."""

    @property
    def size(self) -> int | None: ...
    @property
    def fingerprint(self) -> str:
        """Changes with anything that changes a row."""

    @property
    def description(self) -> str:
        """For error messages."""

    def row(self, index: int) -> Row:
        """Row `index`. Mutates nothing that shows. Raises DataError; UndrawnRowError where others may be drawn."""

    def answers(self) -> Iterable[tuple[str, Answer | None]]:
        """Place and reference answer of every row; of an infinite source, of one row of each task."""


def first_drawn(draw: Callable[[int], T], most: int, *errors: type[Exception]) -> T:
    """The first of `draw(0)`, `draw(1)`, .. that raises none of `errors`; the last of `most` may raise."""
    for index in range(most - 1):
        with suppress(*errors):
            return draw(index)
    return draw(most - 1)


class EnvSource:
    """An infinite source of empty rows: the environment gives the prompts (`reset`). Row i depends on (seed, i)."""

    size: int | None = None
    description = "prompts of the environment"

    def __init__(self, seed: int):
        self._seed = seed

    @property
    def fingerprint(self) -> str:
        return digest("env", self._seed)

    def row(self, index: int) -> Row:
        return Row(f"env:{self._seed:x}:{index}", "", None, "env", {})

    def answers(self) -> Iterable[tuple[str, Answer | None]]:
        return [(self.description, None)]


class FileSource:
    """The records of a JSONL file, a Parquet file or a `datasets` directory."""

    def __init__(
        self,
        config: PromptSourceConfig,
        path: Path,
        records: Any,
        where: Where,
        *,
        takes_tokens: bool = False,
        system: str | None = None,
    ):
        """Checks every record, a mapping. `takes_tokens`: a record may have `token_ids` in place of the prompt.
        `system`: the run's system message. Raises DataError naming a record's place.
        """
        self._takes_tokens, self._system = takes_tokens, system
        self._config, self._path, self._records, self._where = config, path, records, where
        named = hub_name(str(path))  # of the hub the directory is called by the commit
        self._name = path.stem if named is None else named[0]
        self._pattern = None if config.answer_pattern is None else re.compile(config.answer_pattern, re.DOTALL)
        if not len(records):
            raise DataError(f"{path}: no records")
        features = getattr(records, "features", {})
        self._prompt_feature = field_of(features, config.prompt_field)
        feature = field_of(features, config.answer_field)
        self._narrow = _NARROW.get(str(getattr(getattr(feature, "feature", feature), "dtype", None)))
        self._tools_feature = features.get(TOOLS)
        self._examples: dict[Hashable, Example] = {}
        try:
            self._fingerprint = self._check()
        except UnicodeDecodeError as error:  # of a table's strings
            raise DataError(f"{path}: a prompt or answer is not UTF-8 text: {error}") from error

    @property
    def examples(self) -> list[Example]:
        """(place, prompt, tools) of the first record of each form: a chat template may take other forms otherwise."""
        return [*self._examples.values()]

    @property
    def size(self) -> int:
        return len(self._records)

    @property
    def fingerprint(self) -> str:
        """Of all prompts, answers and tools in order; the file may move."""
        return self._fingerprint

    @property
    def description(self) -> str:
        return f"{self._config.kind} {self._path} ({self.size} records)"

    def row(self, index: int) -> Row:
        try:
            record = self._records[index]
        except UnicodeDecodeError as error:
            raise DataError(f"{self._where(index)}: a column is not UTF-8 text: {error}") from error
        prompt, answer = self._fields(index, record)
        taken = {self._config.prompt_field, self._config.answer_field}
        tokens = self._tokens(record)
        taken |= set() if tokens is None else {"token_ids"}
        metadata = {key: without_spelling(value) for key, value in record.items() if key not in taken}
        messages = None if isinstance(prompt, str) else prompt
        text = prompt if isinstance(prompt, str) else last_user_text(prompt)
        if messages is not None:  # `text` is the last one of them only
            metadata[self._config.prompt_field] = [*messages]
        ids, name = None if tokens is None else tuple(tokens), self._name
        of_data = f"{name}:{self._fingerprint}:{index}"  # splits of one data set may have one stem
        return Row(of_data, text, answer, name, metadata, messages, self._where(index), ids, self._tools(index, record))

    def answers(self) -> Iterator[tuple[str, Answer | None]]:
        for index, record in enumerate(self._records_to_check()):
            yield self._where(index), self._fields(index, record)[1]

    def _check(self) -> str:
        """Looks at every record once; returns the fingerprint."""
        sha, answers = hashlib.sha256(), 0
        for index, record in enumerate(self._records_to_check()):
            prompt, answer = self._fields(index, record)
            answers += answer is not None
            tools = self._tools(index, record)
            form = isinstance(prompt, str) or form_of(prompt), bool(tools)
            self._examples.setdefault(form, (self._where(index), prompt, tools))
            sha.update(json.dumps([prompt, answer, tools] if tools else [prompt, answer]).encode())
        field = self._config.answer_field
        # A user's reward function may need no answer; a mistyped column is an error all the same.
        if not answers and field not in (None, _DEFAULT_ANSWER_FIELD):
            there = columns_hint(self._records[0], str(field))
            raise DataError(f"{self._path}: no record has the answer field {field!r}{there}")
        return sha.hexdigest()[:16]

    def _records_to_check(self) -> Iterator[Mapping[str, Any]]:
        """All records. Of tables only the columns that are checked, in batches: a million rows take seconds."""
        if not hasattr(self._records, "select_columns"):
            yield from self._records
            return
        field = self._config.prompt_field
        names = (field, self._config.answer_field or "", TOOLS, *columns_of_prompt(field))
        there = self._records.column_names
        wanted = [c for c in there if any(name == c or name.startswith(f"{c}.") for name in names)]
        for batch in self._records.select_columns(wanted or there).iter(_CHECKED_AT_ONCE):
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(batch, values, strict=True))

    def _fields(self, index: int, record: Mapping[str, Any]) -> tuple[str | Messages, Answer | None]:
        where = self._where(index)
        prompt = without_spelling(field_of(record, self._config.prompt_field))
        prompt = without_absent(prompt, self._prompt_feature)
        if (tokens := self._tokens(record)) is not None:
            _check_tokens(tokens, prompt, where)
        elif prompt is None:
            there = columns_hint(self._records[index], self._config.prompt_field)  # `record` may lack columns
            raise DataError(f"{where}: no field {self._config.prompt_field!r}{there}")
        value = field_of(record, self._config.answer_field)
        if value is not None and self._narrow is not None:
            value = [*map(self._narrow, value)] if isinstance(value, list) else self._narrow(value)
        answer = checked_answer(value, str(self._config.answer_field), where)
        text: str | Messages = ""
        if tokens is None:
            text = checked_prompt(prompt, self._config.prompt_field, where)
            check_not_read(record, self._config.prompt_field, text, where, self._system)
        return text, self._extracted(answer, where)

    def _tools(self, index: int, record: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        tools = without_absent(without_spelling(record.get(TOOLS)), self._tools_feature)
        return checked_tools(tools, self._where(index))

    def _tokens(self, record: Mapping[str, Any]) -> Any:
        return record.get("token_ids") if self._takes_tokens else None

    def _extracted(self, answer: Answer | None, where: str) -> Answer | None:
        """The reference answer within its column. Raises DataError where the pattern finds none."""
        if self._pattern is None or answer is None:
            return answer
        if isinstance(answer, tuple):
            return tuple(self._found(self._pattern, text, where) for text in answer)
        return self._found(self._pattern, answer, where)

    def _found(self, pattern: re.Pattern[str], answer: str, where: str) -> str:
        matches = [*pattern.finditer(answer)]
        found = next((group for group in matches[-1].groups() if group is not None), None) if matches else None
        if found is None:
            field, end = self._config.answer_field, answer[-60:]
            raise DataError(f"{where}: answer_pattern finds nothing in field {field!r}, which ends in {end!r}")
        return found.strip()


def _check_tokens(tokens: Any, prompt: Any, where: str) -> None:
    """Raises DataError for a prompt beside `token_ids`, and for what is no list of token ids."""
    if prompt is not None:
        raise DataError(f"{where}: it has a prompt and token_ids, of which one is needed")
    if not (isinstance(tokens, list) and tokens and all(type(i) is int for i in tokens)):
        raise DataError(f"{where}: field 'token_ids' must be a list of integers that is not empty")


@contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Puts a record's place before the text of a DataError."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{place}: {error}") from error


def open_file(config: PromptSourceConfig, path: Path, system: str | None = None) -> FileSource:
    """The source of a file or directory; `system`: the run's system message. Raises DataError naming file and line or
    record of the first bad one.

    Checks, warnings and the run itself share one: a million rows take seconds and gigabytes.
    """
    return _open_file(config.model_dump_json(), path, system, stamp([path, *path.rglob("*")]))


@lru_cache(maxsize=2)  # training and held-out rows
def _open_file(about: str, path: Path, system: str | None, _stamp: Hashable) -> FileSource:
    config = PromptSourceConfig.model_validate_json(about)
    if config.kind == "jsonl":
        records, lines = read_json(path, spelled=True)
        return FileSource(config, path, records, lambda row: f"{path}:{lines[row]}", system=system)
    if config.kind == "parquet" and not path.is_dir():
        return FileSource(config, path, _read_parquet(path), lambda row: f"{path}:{row}", system=system)
    texts = [*filter(None, (config.prompt_field, config.answer_field))]
    data = read_dataset(path, config.subset, config.split, texts, _ending_of(config))
    return FileSource(config, path, *data, system=system)


def _ending_of(config: PromptSourceConfig) -> str:
    """Of the names of the files that count in a directory: beside Parquet others keep samples of it in JSON."""
    return ".parquet" if config.kind == "parquet" else ""


def _read_parquet(path: Path) -> Any:
    """The rows of a Parquet file. Raises DataError."""
    if not path.exists():
        raise DataError(f"{path}: {no_such_file(path)}")
    return rows_of(read_parquet(path), path)


def unread_warning(config: PromptSourceConfig, field: str) -> str | None:
    """Names shards that a clone lacks, else files of none of its splits. `field`: section of the source."""
    path = Path(config.path or "")
    if config.kind not in ("hf", "parquet") or not path.is_dir() or _is_saved(path):
        return None
    if missing := missing_shards(path):
        return f"{field}.path = {path}: not there, by the names of others: {shortened(missing)}"
    if not (names := unread_files(path, config.subset, _ending_of(config))):
        return None
    why = "their names tell no split, as others' do (data/SPLIT-00000-of-00001, or the word train, test, validation)"
    return f"{field}.path = {path}: not read: {shortened(names)}; {why}"


def _is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in _SAVED)


def read_dataset(
    path: Path, subset: str | None, split: str | None, texts: Sequence[str], ending: str = ""
) -> tuple[Any, Where]:
    """(rows of a split of a data set, as mappings; their places): `Dataset.save_to_disk` wrote it, or it is a clone.

    `texts`, `ending`: see `read_dataset_files`. Raises DataError, also for several splits where none is named.
    """
    import datasets

    if not path.is_dir():
        raise DataError(f"{path}: no such directory")
    if not _is_saved(path):
        return read_dataset_files(path, subset, split, texts, ending)
    try:
        loaded = datasets.load_from_disk(str(path)).with_format(None)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a directory written by Dataset.save_to_disk: {error}") from error
    if not isinstance(loaded, datasets.DatasetDict):
        return of_text(loaded, path), lambda row: f"{path}:{row}"
    wanted = split or DEFAULT_SPLIT
    if wanted not in loaded:
        raise DataError(f"{path}: no split {wanted!r}; there are: {', '.join(loaded)}")
    return of_text(loaded[wanted], path), lambda row: f"{path}:{row}"
