"""Logging of one rank: single lines that name the rank and the phase that it is in.

    12:30:01 rank 1/4 step 7 rollout | WARNING a message

Rank 0 logs from INFO up, the others from WARNING up: a message that all ranks have is shown once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_tlt.errors import printable

ROOT = "megatron_tlt"

_log = logging.getLogger(__name__)


class RankFormatter(logging.Formatter):
    """Formats a record as one line, so that lines of several ranks can mix. One a process."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(where)s | %(levelname)s %(message)s", datefmt="%H:%M:%S")
        self.rank, self.size = 0, 1
        self.phase = "start"
        self.step: int | None = None

    def format(self, record: logging.LogRecord) -> str:
        """The line; line breaks in it (of tracebacks) become ` / `, other control characters (of a user's code, a
        server or a response) escapes. Adds `where` to the record.
        """
        step = "" if self.step is None else f" step {self.step}"
        record.where = f"rank {self.rank}/{self.size}{step} {self.phase}"
        return printable(" / ".join(part.rstrip() for part in super().format(record).splitlines() if part.strip()))


_formatter = RankFormatter()


def setup_logging(rank: int, size: int) -> None:
    """Prepares the package's logger for this rank; may be called again. Lines go to stderr."""
    _formatter.rank, _formatter.size = rank, size
    handler = logging.StreamHandler()
    handler.setFormatter(_formatter)
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False


def enter_phase(name: str, step: int | None = None) -> None:
    """Sets the phase and step (from 1) of the lines from now on."""
    _formatter.phase, _formatter.step = name, step


@contextmanager
def announced(work: str, expected: str) -> Iterator[None]:
    """Logs `work` and how long it is `expected` to take, then its seconds: for work that shows no other sign."""
    _log.info("%s: %s", work, expected)
    started = time.monotonic()
    yield
    _log.info("%s: done in %.1f s", work, time.monotonic() - started)
