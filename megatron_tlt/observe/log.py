"""Logging of one rank: plain single lines that say who speaks and from which phase.

    12:30:01 rank 1/4 step 7 rollout | WARNING a message

Rank 0 speaks from INFO up, the others from WARNING up: what all ranks would say alike is said once.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

ROOT = "megatron_tlt"


class RankContext(logging.Filter):
    """Adds `where` ("rank 1/4 step 7 rollout") to every record. One for each process, changed by `enter_phase`."""

    def __init__(self, rank: int, size: int):
        super().__init__()
        self.rank, self.size = rank, size
        self.phase = "start"
        self.step: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Never drops a record. Mutates it."""
        step = "" if self.step is None else f" step {self.step}"
        record.where = f"rank {self.rank}/{self.size}{step} {self.phase}"
        return True


class OneLineFormatter(logging.Formatter):
    """Keeps a record on one line, so that lines of several ranks can mix and still be read."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; line breaks inside (tracebacks too) become ` / `."""
        return " / ".join(part.rstrip() for part in super().format(record).splitlines() if part.strip())


_context = RankContext(0, 1)


def setup_logging(rank: int, size: int, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Prepares the package's logger for this rank; may be called again. `stream` defaults to stderr."""
    _context.rank, _context.size = rank, size
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.addFilter(_context)
    handler.setFormatter(
        OneLineFormatter("%(asctime)s %(where)s | %(levelname)s %(message)s", datefmt="%H:%M:%S")
    )
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level if rank == 0 else max(level, logging.WARNING))
    logger.propagate = False


def enter_phase(name: str, step: int | None = None) -> None:
    """Lines from now on say that this rank is in phase `name` of `step`."""
    _context.phase, _context.step = name, step
