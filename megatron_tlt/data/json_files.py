"""Records of JSON files: an object a line, or one list of objects; compressed or not."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from megatron_tlt.errors import DataError, no_such_file

UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""Errors of a file that is not there, or is damaged within its compression."""

_SPACE = re.compile(r"[ \t\r\n]*")
_FORM = "a file has one JSON object a line, or one list of them"
_CSV = "; CSV and TSV are read from their directory: of prompts with kind: hf, or as sft.train_path"
_MAGIC_BYTES = 6
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


class JsonNumber(float):
    """A number with a point or an exponent; `text` is its spelling in the file."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> JsonNumber:
        number = super().__new__(cls, text)
        number.text = text
        return number


def without_spelling(value: Any) -> Any:
    """The value with plain floats, as `json` reads it."""
    if isinstance(value, JsonNumber):
        return float(value)
    if isinstance(value, dict):
        return {key: without_spelling(item) for key, item in value.items()}
    return [without_spelling(item) for item in value] if isinstance(value, list) else value


def read_json(path: Path, spelled: bool = False, last: int | None = None) -> tuple[list[dict[str, Any]], list[int]]:
    """(records, numbers of the lines that they begin in); empty lines are skipped.

    `spelled`: numbers with a point or an exponent are `JsonNumber`s. `last`: this many of the last records only. Raises
    DataError naming file and line.
    """
    if path.is_dir():
        raise DataError(f"{path}: is a directory, not a JSONL file")
    decoder = json.JSONDecoder(parse_float=JsonNumber if spelled else None)
    try:
        with open_text(path) as file:
            found = deque(_records(file, path, decoder), last)
    except FileNotFoundError as error:
        raise DataError(f"{path}: {no_such_file(path)}") from error
    except UNREADABLE as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return [record for record, _ in found], [number for _, number in found]


@contextmanager
def open_text(path: Path) -> Iterator[IO[bytes]]:
    """A file of text, unpacked: its first bytes tell how it is compressed. Raises DataError and `UNREADABLE` errors."""
    with path.open("rb") as file, _unpacked(file) as unpacked:
        first = unpacked.peek(_MAGIC_BYTES)
        if first.startswith(_UTF_16):
            raise DataError(f"{path}: is UTF-16 text, must be UTF-8")
        if first.startswith(b"PAR1"):
            raise DataError(f"{path}: is a Parquet file: prompts need kind: parquet, sft.train_path its directory")
        yield unpacked


def _unpacked(file: io.BufferedReader) -> io.BufferedReader:
    openers: dict[bytes, Callable[[Any], Any]] = {
        b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
        b"BZh": bz2.BZ2File,
        b"\xfd7zXZ\x00": lzma.LZMAFile,
        b"\x28\xb5\x2f\xfd": _zstd,
    }
    first = file.peek(_MAGIC_BYTES)
    opener = next((opener for magic, opener in openers.items() if first.startswith(magic)), None)
    return file if opener is None else io.BufferedReader(opener(file))


def _zstd(file: IO[bytes]) -> Any:
    import pyarrow  # a second, which other files do not need

    return pyarrow.CompressedInputStream(file, "zstd")


def _records(file: IO[bytes], path: Path, decoder: json.JSONDecoder) -> Iterator[tuple[dict[str, Any], int]]:
    """`_numbered`, of objects only. Raises DataError."""
    for record, number in _numbered(file, path, decoder):
        if not isinstance(record, dict):
            raise DataError(f"{path}:{number}: expected a JSON object, found {type(record).__name__}")
        yield record, number


def _numbered(file: IO[bytes], path: Path, decoder: json.JSONDecoder) -> Iterator[tuple[Any, int]]:
    """(value, its line) of every line, or of every element where the file is one list. Raises DataError."""
    is_first, is_list = True, False
    for number, line in enumerate(file, start=1):
        try:
            text = line.decode("utf-8-sig")
            if not text.strip():
                continue
            if is_list := is_first and text.lstrip().startswith("["):
                yield from _elements(text + file.read().decode(), number, decoder)
                return
            yield decoder.decode(text.rstrip()), number  # an error at its end is on this line
        except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
            place, reason = number, str(error)
            if isinstance(error, json.JSONDecodeError):  # its own line counts from `number` on
                place += error.lineno - 1 if is_list else 0
                reason = f"{error.msg} at character {error.colno}"
            nul = "; it has NUL bytes" if b"\0" in line else ""
            csv = _CSV if {".csv", ".tsv"} & {*path.suffixes} else ""
            raise DataError(f"{path}:{place}: not a JSON object: {reason}{nul} ({_FORM}, in UTF-8){csv}") from error
        is_first = False


def _elements(text: str, line: int, decoder: json.JSONDecoder) -> Iterator[tuple[Any, int]]:
    """(value, its line) of every element of the list that is the text. `line`: of its begin. Raises JSONDecodeError."""

    def after_space(at: int) -> int:
        return cast("re.Match[str]", _SPACE.match(text, at)).end()

    begin = after_space(0)
    at = after_space(begin + 1)
    is_open = text[at : at + 1] != "]"
    counted = 0
    while is_open:
        value, end = decoder.raw_decode(text, at)
        line += text.count("\n", counted, at)
        yield value, line
        counted, at = at, after_space(end)
        is_open = text[at : at + 1] == ","
        at = after_space(at + 1) if is_open else at
    if text[at : at + 1] != "]":
        raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
    if text[after_space(at + 1) :]:
        raise json.JSONDecodeError("Extra data", text, at + 1)
