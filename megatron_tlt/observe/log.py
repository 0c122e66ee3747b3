"""Logging of one rank: single lines that name the rank and the phase that it is in.

    12:30:01 rank 1/4 phase rollout, step 7 | WARNING a message

Rank 0 logs from INFO up, the others from WARNING up: a message that all ranks have is shown once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_tlt.errors import printable

ROOT = "megatron_tlt"

_log = logging.getLogger(__name__)


class RankFormatter(logging.Formatter):
    """Formats a record as one line, so that lines of several ranks can mix."""

    def __init__(self, rank: int = 0, size: int = 1, where: Callable[[], str] = lambda: "phase start") -> None:
        """`where` returns the present phase."""
        super().__init__("%(asctime)s %(where)s | %(levelname)s %(message)s", datefmt="%H:%M:%S")
        self._rank, self._where = f"rank {rank}/{size}", where

    def format(self, record: logging.LogRecord) -> str:
        """The line; line breaks in it (of tracebacks) become ` / `, other control characters (of a user's code, a
        server or a response) escapes. Adds `where` to the record.
        """
        record.where = f"{self._rank} {self._where()}"
        return printable(" / ".join(part.rstrip() for part in super().format(record).splitlines() if part.strip()))


def setup_logging(rank: int, size: int, where: Callable[[], str]) -> None:
    """Prepares the package's logger for this rank, whose present phase `where` returns; may be called again. Lines go
    to stderr.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(RankFormatter(rank, size, where))
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False


@contextmanager
def announced(work: str, expected: str) -> Iterator[None]:
    """Logs `work` and how long it is `expected` to take, then its seconds: for work that shows no other sign."""
    _log.info("%s: %s", work, expected)
    started = time.monotonic()
    yield
    _log.info("%s: done in %.1f s", work, time.monotonic() - started)
