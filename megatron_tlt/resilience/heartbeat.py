"""The status files of a run: JSON, whole or not there, readable by the user alone. Stdlib only.

    RUN_DIR/status/rank-00003.json    what a rank did when its host's watchdog last looked (`Heartbeat`)
    RUN_DIR/status/end.json           why the job ends (`JobEnd`): written once, by the watchdog that finds out first
    RUN_DIR/stacks/rank-3.txt         stacks, appended

Files of another start of the job (`start_id`) are ignored.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar


@dataclass(frozen=True)
class Heartbeat:
    """One rank's state. Seconds are those at the time of writing."""

    start_id: str
    rank: int
    size: int
    host: str
    pid: int
    seq: int = 0
    """Counts writes: shows without comparing clocks of two hosts that there was one."""
    outcome: str = "running"
    """running; done; saved: before the run's end, by a signal;
    failed, killed, hung: this rank is why the job ended; ended: it ended with the job."""
    detail: str = ""
    process: str = "?"
    """The kernel's letter: R running, S sleeping, D in the kernel, T stopped, Z dead; ? not known."""
    phase: str = "start"
    step: int = -1
    order: int = 0
    """Phases entered so far: ranks go through the same ones, so the lowest is behind."""
    state: str = ""
    """Of an idle window: BUSY, IDLE or TRAINING; empty elsewhere."""
    phase_seconds: float = 0.0
    silent_seconds: float = 0.0
    """Since the last sign of life."""
    limit_seconds: float = 0.0
    """That the phase should not exceed, from its own history; 0: not known yet."""
    running: int = 0
    """Requests that the engine decodes."""
    queued: int = 0
    """Requests that wait in the engine."""
    longest: int = 0
    """Tokens of the longest running response."""
    left: float = 0.0
    """Tokens still expected of this replica."""
    stacks: bool = False
    """Whether it has written its stacks, because the job hangs."""
    heartbeat_s: float = 5.0
    hang_s: float = 0.0
    written_at: float = 0.0
    """Wall time."""

    @property
    def is_running(self) -> bool:
        """Whether the rank has not ended."""
        return self.outcome == "running"

    @property
    def is_waiting(self) -> bool:
        """Whether it only waits for other ranks (and may train the drafter meanwhile)."""
        return self.phase == "idle" or self.state == "IDLE"


@dataclass(frozen=True)
class JobEnd:
    """Why a job ends."""

    start_id: str
    outcome: str
    """killed, failed or hung."""
    text: str
    ranks: list[int] = field(default_factory=list)
    """The ranks at fault."""


StatusFile = TypeVar("StatusFile", Heartbeat, JobEnd)


class StatusFiles:
    """The status files of one run directory."""

    def __init__(self, run_dir: str | Path):
        self.stacks = Path(run_dir) / "stacks"
        self.status = Path(run_dir) / "status"
        self.end = self.status / "end.json"

    def heartbeat(self, rank: int) -> Path:
        """The file of a rank's heartbeat."""
        return self.status / f"rank-{rank:05d}.json"

    def stacks_of(self, rank: int) -> Path:
        """The file of a rank's stacks."""
        return self.stacks / f"rank-{rank}.txt"

    def clear(self) -> None:
        """Rank 0, before any watchdog starts: private directories, without files of an earlier start."""
        for folder in (self.status, self.stacks):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
        for path in self.status.glob("*.json*"):
            path.unlink(missing_ok=True)

    def read_heartbeats(self, start_id: str | None = None) -> tuple[dict[int, Heartbeat], list[str]]:
        """All ranks' heartbeats by rank (of one start only, if given), and a line for each damaged file."""
        beats: dict[int, Heartbeat] = {}
        problems = []
        for path in sorted(self.status.glob("rank-*.json")):
            try:
                beat = _read(path, Heartbeat)
            except (ValueError, TypeError) as error:
                problems.append(f"{path}: damaged: {error}")
                continue
            if beat is not None and start_id in (None, beat.start_id):
                beats[beat.rank] = beat
        return beats, problems

    def read_end(self, start_id: str) -> JobEnd | None:
        """Why this start of the job ends; None while it runs."""
        with suppress(ValueError, TypeError):  # damaged
            end = _read(self.end, JobEnd)
            if end is not None and end.start_id == start_id:
                return end
        return None


def write_status(path: Path, value: Heartbeat | JobEnd, *, only_first: bool = False) -> bool:
    """Writes a status file atomically; with `only_first`, False if there is one already. Raises OSError."""
    handle, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)  # 0600
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(value), file, allow_nan=False)
        if only_first:
            os.link(name, path)
        else:
            os.replace(name, path)
    except FileExistsError:
        return False
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)
    return True


def _read(path: Path, kind: type[StatusFile]) -> StatusFile | None:
    try:
        tree = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return kind(**tree)
