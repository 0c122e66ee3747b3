"""All errors this package raises on purpose (`ConfigError` is also a `ValueError`); lists and tables in messages."""

from __future__ import annotations

import difflib
import os
import re
import sysconfig
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice


def shortened(items: Sequence[object], most: int = 8, separator: str = ", ") -> str:
    """The first `most` items joined by `separator`, and how many more there are: lists in messages."""
    words = [str(item) for item in items[:most]]
    if len(items) > most:
        words.append(f"and {len(items) - most} more")
    return separator.join(words)


# All but tab and line feed; also marks of writing direction, which reorder a line, and halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MOST_NAMES = 1000  # of a directory that are compared: a tenth of a second
LONGEST_FAILURE = 500  # characters of an error message that travel and are logged
_NOT_USERS = ("<", os.path.dirname(__file__), *(sysconfig.get_path(name) for name in ("stdlib", "purelib")))


def printable(text: str) -> str:
    """A text with its control characters as escapes, since a terminal would obey them; lines and tabs stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def error_line(error: BaseException) -> str:
    """An error of a user's code as one printable line of bounded length, with its place."""
    try:
        message = str(error)
    except Exception as failed:  # noqa: BLE001  its class may fail in __str__
        message = f"(its message cannot be read: {type(failed).__name__})"
    lines = printable(message[: 2 * LONGEST_FAILURE].replace("\r\n", "\n")).splitlines()
    place = printable(place_of(error))
    text = f"{printable(type(error).__name__)}: {' / '.join(lines)}".removesuffix(": ")
    return f"{text[: max(0, LONGEST_FAILURE - len(place))]}{place}"


def place_of(error: BaseException) -> str:
    """ " (FILE:LINE)" of the innermost line of a user's code that an error came from; "" if it came from none.

    A user's code is what belongs neither to this package nor to Python and its installed packages.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = [f for f in frames if not f.filename.startswith(_NOT_USERS)]
    return f" ({places[-1].filename}:{places[-1].lineno})" if places else ""


def no_such_file(path: str | os.PathLike[str]) -> str:
    """Says that nothing is at `path`: with the nearest name beside it, and with what a relative path counts from. Of a
    file in the place of a directory, or a directory in that of a file: that it is one.
    """
    if os.path.exists(path):
        return "is a directory, no file" if os.path.isdir(path) else "is no directory"
    relative = "" if os.path.isabs(path) else f" (a relative path counts from {os.getcwd()})"
    return f"no such file or directory{relative}{nearest_name(path)}"


def nearest_name(path: str | os.PathLike[str]) -> str:
    """`did_you_mean` of the names in the folder of a path that is not there."""
    folder, name = os.path.split(os.fspath(path).rstrip(os.sep))
    beside: list[str] = []
    with suppress(OSError), os.scandir(folder or ".") as entries:  # it may be missing, or not readable
        beside = [entry.name for entry in islice(entries, _MOST_NAMES)]
    return did_you_mean(name, beside)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?" with the known word that is nearest to a wrong one; "" where none is near."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """A line of text for each row: columns as wide as they need, those in `left` aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        lines.append("  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(cells)).rstrip())
    return lines


class TltError(Exception):
    """Base of every error that a user or operator can act on."""


_SHOWN = 300  # characters of a value in a message


@dataclass(frozen=True)
class ConfigProblem:
    """One error of a configuration: its field, the given value, the allowed ones."""

    path: str
    value: object
    allowed: str

    def __str__(self) -> str:
        shown = repr(self.value)
        return f"{self.path} = {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + ' ...'}: {self.allowed}"


Problems = Iterator[ConfigProblem]


class ConfigError(TltError, ValueError):
    """A configuration that cannot run. Carries every problem found, not only the first, and each once."""

    def __init__(self, problems: list[ConfigProblem] | ConfigProblem):
        given = [problems] if isinstance(problems, ConfigProblem) else problems
        self.problems = list({str(p): p for p in given}.values())  # two checks may find the same
        super().__init__("\n".join(str(p) for p in self.problems))

    @classmethod
    def of(cls, path: str, value: object, allowed: str) -> ConfigError:
        """An error with one problem."""
        return cls(ConfigProblem(path, value, allowed))


class CheckpointError(TltError):
    """A checkpoint or model directory that is missing, torn, altered or contradicts its configuration."""


class SyncError(TltError):
    """A weight sync that did not arrive whole, or arrived different."""


class BackendError(TltError):
    """A rollout engine that cannot serve: bad request, dead process, torn weights."""


class SharedError(TltError):
    """An error that every rank raises at the same point, so that all can save what is done before they end."""


class SaveError(CheckpointError, SharedError):
    """A checkpoint that could not be written."""


class RewardError(TltError):
    """A reward function that cannot be loaded (its failure on some responses is recorded, not raised)."""


class UnjudgedError(RewardError, SharedError):
    """A rollout in which every reward failed on every response, or that a rank cannot judge."""


class EnvError(TltError):
    """An environment that cannot be loaded, or a call of it that failed (that of one turn ends its trajectory and is
    recorded, not raised)."""


class OpeningError(EnvError, SharedError):
    """An environment that gave no opening text for a prompt."""


class UserCodeError(TltError):
    """A user's function or class that cannot be loaded."""


class DataError(TltError):
    """Prompts or training records that cannot be read; names file and line."""


class PromptError(DataError, SharedError):
    """A prompt of a stream that cannot be read or tokenized, when its step needs it."""


class UndrawnRowError(DataError):
    """One row that a generator cannot draw; others of its source may be drawn."""


class DistributedError(TltError):
    """A collective that did not complete, or a world of the wrong size; names phase and missing ranks."""


class RunDirectoryError(SharedError):
    """A run directory that another job is using."""


class TrainingError(SharedError):
    """Training that cannot go on: its updates are not finite any more, or no step finds a group with a gradient."""


class DrafterError(TltError):
    """Drafter training failed; the loop goes on without it."""
