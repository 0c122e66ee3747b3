"""The status files of a run, readable by the user alone. Stdlib only.

RUN_DIR/status/rank-00003.json    a rank's last sign of life (`RankStatus`), overwritten in place by the rank
RUN_DIR/status/host-00000         touched by the watchdog of the host whose first rank is 0
RUN_DIR/status/end-START.json     why this start of the job ends (`JobEnd`), by the first process that finds out
RUN_DIR/stacks/rank-3.txt         stacks, appended
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

_RANK_BYTES = 4096  # of a rank's file: always the same, so that overwriting needs no space on the disk
_DETAIL_CHARS = 500  # of an error message in it


HEARTBEAT_S = 5.0  # between two signs of life of a rank within a phase


@dataclass(frozen=True)
class RankStatus:
    """One rank's last sign of life. Times are wall time, in seconds."""

    start: str
    """Which start of the job; files of another one are ignored."""
    rank: int
    size: int
    host: str
    pid: int
    first: int = 0
    """First rank of its host."""
    heartbeat_s: float = HEARTBEAT_S
    outcome: str = "running"
    """running; done; saved: before the run's end, by a signal; ended: before it, without a checkpoint; failed."""
    detail: str = ""
    phase: str = "start"
    step: int = -1
    """The step under way, from 1; -1 before the first."""
    state: str = ""
    """Of an idle window: BUSY, IDLE, PRE_ROLLING or TRAINING; empty elsewhere."""
    phase_at: float = 0.0
    """When the phase began."""
    written_at: float = 0.0
    limit_seconds: float = 0.0
    """The phase's expected maximum, from its own history; 0: not known yet."""
    running: int = 0
    """Requests that the engine decodes."""
    queued: int = 0
    """Requests that wait in the engine."""
    longest: int = 0
    """Tokens of the longest running response."""
    left: float = 0.0
    """Tokens still expected of this replica."""

    @property
    def name(self) -> str:
        """Rank, host and process, for messages."""
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def where(self) -> str:
        """Phase and step, for messages."""
        return f"phase {self.phase}, step {self.step}" if self.step >= 0 else f"phase {self.phase}"


@dataclass(frozen=True)
class JobEnd:
    """Why a job ends."""

    start: str
    outcome: str
    """killed, failed or hung."""
    text: str
    ranks: list[int] = field(default_factory=list)
    """The ranks at fault."""
    at: float = 0.0
    """Wall time."""


class StatusFiles:
    """The status files of one run directory."""

    def __init__(self, run_dir: str | Path):
        self.stacks = Path(run_dir) / "stacks"
        self.status = Path(run_dir) / "status"

    def rank(self, rank: int) -> Path:
        """The file of a rank."""
        return self.status / f"rank-{rank:05d}.json"

    def host(self, first: int) -> Path:
        """The file of the watchdog of the host whose first rank is `first`."""
        return self.status / f"host-{first:05d}"

    def end(self, start: str) -> Path:
        """The file that says why a start of the job ends; there is none while it runs."""
        return self.status / f"end-{start}.json"

    def stacks_of(self, rank: int) -> Path:
        """The file of a rank's stacks."""
        return self.stacks / f"rank-{rank}.txt"

    def clear(self) -> None:
        """Rank 0, before any watchdog starts: private directories, without files of an earlier start."""
        for folder in (self.status, self.stacks):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
        for path in self.status.iterdir():
            path.unlink(missing_ok=True)

    def write_rank(self, status: RankStatus) -> None:
        """Overwrites a rank's file. Raises OSError."""
        tree = asdict(status) | {"detail": status.detail[:_DETAIL_CHARS]}
        fd = os.open(self.rank(status.rank), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(fd, json.dumps(tree, allow_nan=False).encode().ljust(_RANK_BYTES), 0)
        finally:
            os.close(fd)  # network file systems send it to the server now

    def read_rank(self, rank: int) -> RankStatus | None:
        """A rank's status; None without one. Raises ValueError and TypeError if the file is damaged."""
        tree = _read(self.rank(rank))
        return None if tree is None else RankStatus(**tree)

    def read_ranks(self) -> tuple[dict[int, RankStatus], list[str]]:
        """All ranks' statuses by rank, and a line for each damaged file. Raises OSError where they may not be read."""
        ranks: dict[int, RankStatus] = {}
        problems = []
        names: list[str] = []
        with suppress(FileNotFoundError, NotADirectoryError):  # no run yet
            names = os.listdir(self.status)  # unlike `glob` it does not take a forbidden directory for an empty one
        for path in (self.status / name for name in sorted(names) if fnmatch(name, "rank-*.json")):
            try:
                status = self.read_rank(int(path.stem.removeprefix("rank-")))
            except (ValueError, TypeError) as error:
                problems.append(f"{path}: damaged: {error}")
                continue
            if status is not None:
                ranks[status.rank] = status
        return ranks, problems

    def claim_end(self, end: JobEnd) -> bool:
        """Writes why the job ends, atomically; False if another process has done so. Raises OSError."""
        handle, name = tempfile.mkstemp(dir=self.status)  # 0600
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(asdict(end), file)
            os.link(name, self.end(end.start))
        except FileExistsError:
            return False
        finally:
            os.unlink(name)
        return True

    def read_end(self, start: str) -> JobEnd | None:
        """Why this start of the job ends; None while it runs."""
        with suppress(ValueError, TypeError, OSError):  # damaged; or the file system fails for now
            tree = _read(self.end(start))
            return None if tree is None else JobEnd(**tree)
        return None


def _read(path: Path) -> Any:
    try:
        try:
            return json.loads(path.read_bytes())
        except ValueError:  # perhaps in the middle of a write
            time.sleep(0.01)
            return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
