"""Finite prompt sources: the records of a file, by number. Nothing is shuffled or tokenized here."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from megatron_tlt.config.data import PromptSourceConfig
from megatron_tlt.data.chat import Messages, as_messages, as_prompt, form_of, last_user_text
from megatron_tlt.data.dataset_files import DEFAULT_SPLIT, read_dataset_files
from megatron_tlt.data.hashing import digest
from megatron_tlt.errors import DataError

_DEFAULT_ANSWER_FIELD = "answer"
_SAVED = ("state.json", "dataset_dict.json")  # of Dataset.save_to_disk and DatasetDict.save_to_disk
_CHECKED_AT_ONCE = 1000  # rows


@dataclass(frozen=True)
class Row:
    """One prompt before tokenization. `metadata` has the source's other columns.

    `messages`: the whole prompt where it is a chat; `prompt` is then its last user message.
    """

    dataset_id: str
    prompt: str
    answer: str | None
    task: str
    metadata: dict[str, Any]
    messages: Messages | None = None

    def with_opening(self, text: str) -> Row:
        """The row with a text of the environment at its end."""
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
        """Row `index`. Mutates nothing that shows. Raises DataError."""


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


class FileSource:
    """The records of a JSONL file, a Parquet file or a `datasets` directory."""

    def __init__(self, config: PromptSourceConfig, path: Path, records: Any, places: Sequence[object]):
        """Checks every record, a mapping; number i stands at `places[i]`. Raises DataError naming file and place."""
        self._config, self._path, self._records, self._places = config, path, records, places
        self._pattern = None if config.answer_pattern is None else re.compile(config.answer_pattern, re.DOTALL)
        if not len(records):
            raise DataError(f"{path}: no records")
        self._examples: dict[Hashable, tuple[str, str | Messages]] = {}
        self._fingerprint = self._check()

    @property
    def examples(self) -> list[tuple[str, str | Messages]]:
        """(place, prompt) of the first record of each form, which is all that a chat template may take otherwise."""
        return [*self._examples.values()]

    @property
    def size(self) -> int:
        return len(self._records)

    @property
    def fingerprint(self) -> str:
        """Of all prompts and answers in order; the file may move."""
        return self._fingerprint

    @property
    def description(self) -> str:
        return f"{self._config.kind} {self._path} ({self.size} records)"

    def row(self, index: int) -> Row:
        record = self._records[index]
        prompt, answer = self._fields(index, record)
        taken = {self._config.prompt_field, self._config.answer_field}
        metadata = {key: value for key, value in record.items() if key not in taken}
        messages = None if isinstance(prompt, str) else prompt
        text = prompt if isinstance(prompt, str) else last_user_text(prompt)
        return Row(f"{self._path.stem}:{index}", text, answer, self._path.stem, metadata, messages)

    def _check(self) -> str:
        """Looks at every record once; returns the fingerprint."""
        sha, answers = hashlib.sha256(), 0
        for index, record in enumerate(self._records_to_check()):
            prompt, answer = self._fields(index, record)
            answers += answer is not None
            form = None if isinstance(prompt, str) else form_of(prompt)
            self._examples.setdefault(form, (f"{self._path}:{self._places[index]}", prompt))
            sha.update(json.dumps([prompt, answer]).encode())
        field = self._config.answer_field
        # A user's reward function may need no answer; a mistyped column is an error all the same.
        if not answers and field != _DEFAULT_ANSWER_FIELD:
            there = columns_hint(self._records[0], field)
            raise DataError(f"{self._path}: no record has the answer field {field!r}{there}")
        return sha.hexdigest()[:16]

    def _records_to_check(self) -> Iterator[Mapping[str, Any]]:
        """All records. Of tables only the columns of prompt and answer, in batches: a million rows take seconds."""
        if not hasattr(self._records, "select_columns"):
            yield from self._records
            return
        names = (self._config.prompt_field, self._config.answer_field)
        there = self._records.column_names
        wanted = [c for c in there if any(name == c or name.startswith(f"{c}.") for name in names)]
        for batch in self._records.select_columns(wanted or there).iter(_CHECKED_AT_ONCE):
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(batch, values, strict=True))

    def _fields(self, index: int, record: Mapping[str, Any]) -> tuple[str | Messages, str | None]:
        where = f"{self._path}:{self._places[index]}"
        prompt = field_of(record, self._config.prompt_field)
        if prompt is None:
            there = columns_hint(record, self._config.prompt_field)
            raise DataError(f"{where}: no field {self._config.prompt_field!r}{there}")
        answer = field_of(record, self._config.answer_field)
        if answer is not None and not isinstance(answer, str | int | float):
            found = type(answer).__name__
            allowed = "must be a string or a number"
            raise DataError(f"{where}: field {self._config.answer_field!r} {allowed}, found {found}")
        text = None if answer is None else str(answer)
        return checked_prompt(prompt, self._config.prompt_field, where), self._extracted(text, where)

    def _extracted(self, answer: str | None, where: str) -> str | None:
        """The reference answer within its column. Raises DataError where the pattern finds none."""
        if self._pattern is None or answer is None:
            return answer
        matches = [*self._pattern.finditer(answer)]
        found = next((group for group in matches[-1].groups() if group is not None), None) if matches else None
        if found is None:
            field, end = self._config.answer_field, answer[-60:]
            raise DataError(f"{where}: answer_pattern finds nothing in field {field!r}, which ends in {end!r}")
        return found.strip()


@contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Puts a record's place before the text of a DataError."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{place}: {error}") from error


def field_of(record: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a field of one for a name with dots; None where it is missing."""
    if name in record:
        return record[name]
    first, _, rest = name.partition(".")
    inner = record.get(first)
    return field_of(inner, rest) if rest and isinstance(inner, Mapping) else None


def checked_prompt(value: Any, field: str, where: str) -> str | Messages:
    """A string, or the messages of a chat to respond to. Raises DataError."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list):
        return as_prompt(checked_messages(value, field, where))
    found = type(value).__name__ if value != "" else "an empty string"
    raise DataError(f"{where}: field {field!r} must be a string or a list of chat messages, found {found}")


def checked_messages(value: Any, field: str, where: str) -> Messages:
    """The messages of a column. Raises DataError."""
    try:
        return as_messages(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: field {field!r}: {error}") from error


def columns_hint(record: Mapping[str, Any], wanted: str) -> str:
    """The columns that there are, and the one whose name is nearest to `wanted`, for an error."""
    close = difflib.get_close_matches(wanted, record, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    return f"; there are {', '.join(map(repr, sorted(record))) or 'none'}{hint}"


def open_file(config: PromptSourceConfig, path: Path) -> FileSource:
    """The source of a file or directory. Raises DataError naming file and line or record of the first bad one."""
    if config.kind == "jsonl":
        return FileSource(config, path, *read_jsonl(path))
    if config.kind == "parquet":
        records = _read_parquet(path)
    else:
        records = read_dataset(path, config.subset, config.split)
    return FileSource(config, path, records, range(len(records)))


def read_jsonl(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """(records, their line numbers) of a file with one JSON object a line; empty lines are skipped.

    Raises DataError naming file and line.
    """
    if not path.is_file():
        raise DataError(f"{path}: " + ("is a directory, not a JSONL file" if path.is_dir() else "no such file"))
    records, numbers = [], []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
                raise DataError(f"{path}:{number}: not a JSON object: {error}") from error
            if not isinstance(record, dict):
                raise DataError(f"{path}:{number}: expected a JSON object, found {type(record).__name__}")
            records.append(record)
            numbers.append(number)
    return records, numbers


def _read_parquet(path: Path) -> Any:
    """The rows of a Parquet file, or of a directory of them."""
    import datasets
    import pyarrow.parquet

    if not path.exists():
        raise DataError(f"{path}: no such file")
    try:
        return datasets.Dataset(pyarrow.parquet.read_table(path))
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from error


def read_dataset(path: Path, subset: str | None, split: str | None) -> Any:
    """The rows of a data set's split, as mappings: of a directory that `Dataset.save_to_disk` wrote, or of a clone.

    Raises DataError, also for several splits where none is named.
    """
    import datasets

    if not path.is_dir():
        raise DataError(f"{path}: no such directory")
    if not any((path / name).is_file() for name in _SAVED):
        return read_dataset_files(path, subset, split)
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a directory written by Dataset.save_to_disk: {error}") from error
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    wanted = split or DEFAULT_SPLIT
    if wanted not in loaded:
        raise DataError(f"{path}: no split {wanted!r}; there are: {', '.join(loaded)}")
    return loaded[wanted]
