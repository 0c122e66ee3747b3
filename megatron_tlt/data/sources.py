"""Finite prompt sources: the records of a file, by number. Nothing is shuffled or tokenized here."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_tlt.config.data import PromptSourceConfig
from megatron_tlt.errors import DataError

_DEFAULT_ANSWER_FIELD = "answer"


@dataclass(frozen=True)
class Row:
    """One prompt before tokenization. `metadata` has the source's other columns."""

    dataset_id: str
    prompt: str
    answer: str | None
    task: str
    metadata: dict[str, Any]


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


class FileSource:
    """The records of a JSONL file, a Parquet file or a `datasets` directory."""

    def __init__(self, config: PromptSourceConfig, path: Path, records: Any, places: Sequence[object]):
        """Checks every record, a mapping; number i stands at `places[i]`. Raises DataError naming file and place."""
        self._config, self._path, self._records, self._places = config, path, records, places
        if not len(records):
            raise DataError(f"{path}: no records")
        self._fingerprint = self._check()

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
        return Row(f"{self._path.stem}:{index}", prompt, answer, self._path.stem, metadata)

    def _check(self) -> str:
        """Looks at every record once; returns the fingerprint."""
        sha, answers = hashlib.sha256(), 0
        for index in range(self.size):
            prompt, answer = self._fields(index, self._records[index])
            answers += answer is not None
            sha.update(json.dumps([prompt, answer]).encode())
        field = self._config.answer_field
        # A user's reward function may need no answer; a mistyped column is an error all the same.
        if not answers and field != _DEFAULT_ANSWER_FIELD:
            there = _columns(self._records[0], field)
            raise DataError(f"{self._path}: no record has the answer field {field!r}{there}")
        return sha.hexdigest()[:16]

    def _fields(self, index: int, record: Mapping[str, Any]) -> tuple[str, str | None]:
        where = f"{self._path}:{self._places[index]}"
        prompt = record.get(self._config.prompt_field)
        if prompt is None:
            there = _columns(record, self._config.prompt_field)
            raise DataError(f"{where}: no field {self._config.prompt_field!r}{there}")
        if not isinstance(prompt, str) or not prompt:
            found = type(prompt).__name__ if prompt != "" else "an empty string"
            raise DataError(f"{where}: field {self._config.prompt_field!r} must be a string, found {found}")
        answer = record.get(self._config.answer_field)
        if answer is not None and not isinstance(answer, str | int | float):
            found = type(answer).__name__
            allowed = "must be a string or a number"
            raise DataError(f"{where}: field {self._config.answer_field!r} {allowed}, found {found}")
        return prompt, None if answer is None else str(answer)


def _columns(record: Mapping[str, Any], wanted: str) -> str:
    close = difflib.get_close_matches(wanted, record, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    return f"; there are {', '.join(map(repr, sorted(record))) or 'none'}{hint}"


def open_file(config: PromptSourceConfig, path: Path) -> FileSource:
    """The source of a file or directory. Raises DataError naming file and line or record of the first bad one."""
    if config.kind == "jsonl":
        return FileSource(config, path, *read_jsonl(path))
    records = _read_parquet(path) if config.kind == "parquet" else _read_dataset(path)
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


def read_completions(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The {"prompt", "completion"} records of a JSONL file and their line numbers.

    Raises DataError naming file and line, also where a record lacks one of the two texts or there is no record.
    """
    records, numbers = read_jsonl(path)
    for record, number in zip(records, numbers, strict=True):
        if missing := [k for k in ("prompt", "completion") if not isinstance(record.get(k), str)]:
            raise DataError(
                f"{path}:{number}: field {missing[0]!r} must be a string, found keys {sorted(record)}"
            )
    if not records:
        raise DataError(f"{path}: no records")
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


def _read_dataset(path: Path) -> Any:
    """The one split in a directory that `Dataset.save_to_disk` wrote."""
    import datasets

    if not path.is_dir():
        raise DataError(f"{path}: no such directory; kind: hf reads what Dataset.save_to_disk wrote")
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a directory written by Dataset.save_to_disk: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        splits = ", ".join(str(path / name) for name in loaded)
        raise DataError(f"{path}: holds several splits; name one of: {splits}")
    return loaded
