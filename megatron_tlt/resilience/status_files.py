"""The files that ranks, their watchdogs and operators share: JSON, whole or not there, private to the user.

    RUN_DIR/status/rank-00003.json    what a rank did when it was last looked at (`Beat`)
    RUN_DIR/status/verdict.json       why the job ends (`Verdict`): written once an attempt, by whoever finds out first
    RUN_DIR/status/ask.json           an operator asks for stacks
    RUN_DIR/status/alive/00003        open as long as the rank lives (`deaths.py`)
    RUN_DIR/stacks/rank-3.txt         stacks, appended

An *attempt* is one start of the job; what belongs to another one is ignored. Stdlib only.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 16
VERSION = 1


def status_dir(run_dir: str | Path) -> Path:
    """Where the status files are."""
    return Path(run_dir) / "status"


def beat_path(run_dir: str | Path, rank: int) -> Path:
    """Where a rank's beat is."""
    return status_dir(run_dir) / f"rank-{rank:05d}.json"


def stacks_path(run_dir: str | Path, rank: int) -> Path:
    """Where a rank's stacks are."""
    return Path(run_dir) / "stacks" / f"rank-{rank}.txt"


@dataclass(frozen=True)
class Beat:
    """What a rank's watchdog wrote. Seconds are those at the time of writing."""

    attempt: str
    rank: int
    size: int
    host: str
    pid: int
    seq: int
    """Counts writes: a reader sees by it, not by clocks, that there is news."""
    outcome: str = "running"
    """running; done; saved: before the run's end, by a signal;
    failed, killed, hung: this rank is why the job ended; ended: it went down with the job."""
    detail: str = ""
    process: str = "?"
    """The kernel's letter: R running, S sleeping, D in the kernel, T stopped, Z dead; ? not known."""
    phase: str = "start"
    step: int = -1
    order: int = 0
    state: str = ""
    phase_seconds: float = 0.0
    silent_seconds: float = 0.0
    """Since the last sign of life."""
    limit_seconds: float = 0.0
    running: int = 0
    queued: int = 0
    longest: int = 0
    left: float = 0.0
    stacks: str = ""
    """The last request for stacks that was answered."""
    heartbeat_s: float = 5.0
    hang_s: float = 0.0
    written_at: float = 0.0
    """Wall time."""
    version: int = VERSION

    @property
    def is_running(self) -> bool:
        """Whether the rank had not ended."""
        return self.outcome == "running"

    @property
    def is_waiting(self) -> bool:
        """Whether it has nothing to do but to wait for others (and may train meanwhile, or be about to help them)."""
        return self.phase == "idle" or self.state == "IDLE"


@dataclass(frozen=True)
class Verdict:
    """Why a job ends."""

    attempt: str
    id: str
    kind: str
    """killed, failed or hung."""
    by: int
    """The rank whose watchdog says so."""
    at: float
    """Wall time."""
    text: str
    ranks: list[int] = field(default_factory=list)
    """Whose fault it is."""


@dataclass(frozen=True)
class Ask:
    """A request for stacks of all ranks."""

    attempt: str
    id: str


def make_private(directory: Path) -> Path:
    """Makes a directory that nobody else may enter; takes rights away from one that is there."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    directory.chmod(0o700)
    return directory


def write_json(path: Path, value: Any, *, unless_there: bool = False) -> bool:
    """Writes a dataclass whole. With `unless_there`, False if there is such a file already. Raises OSError."""
    data = json.dumps(asdict(value), allow_nan=False).encode()
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        if not unless_there:
            os.replace(name, path)
            return True
        try:
            os.link(name, path)  # with its contents, or not at all
        except FileExistsError:
            return False
        return True
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def _read(path: Path, kind: type[Any]) -> Any:
    """The dataclass in a file; None if there is none. Raises ValueError, naming the file, for anything else."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES)
        tree = json.loads(data)
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(tree, Mapping):
        raise ValueError(f"{path}: not a mapping")
    wanted = {f.name: f for f in fields(kind)}
    known = {name: value for name, value in tree.items() if name in wanted}
    for name, value in known.items():
        kind_name = str(wanted[name].type)
        right = {"int": int, "float": (int, float), "str": str}.get(kind_name, list)
        if not isinstance(value, right) or isinstance(value, bool):  # type: ignore[arg-type]
            raise ValueError(f"{path}: {name} = {value!r:.80} is no {kind_name}")
    try:
        return kind(**known)
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from error


def read_beat(path: Path) -> Beat | None:
    """A rank's beat; None if there is none. Raises ValueError for a damaged file."""
    beat: Beat | None = _read(path, Beat)
    return beat


def read_beats(run_dir: str | Path, attempt: str | None = None) -> tuple[dict[int, Beat], list[str]]:
    """All ranks' beats by rank (of one attempt only, if given), and what is wrong with files that are none."""
    beats: dict[int, Beat] = {}
    problems = []
    for path in sorted(status_dir(run_dir).glob("rank-*.json")):
        try:
            beat = read_beat(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        if beat is not None and attempt in (None, beat.attempt):
            beats[beat.rank] = beat
    return beats, problems


def verdict_path(run_dir: str | Path) -> Path:
    """Where the verdict is."""
    return status_dir(run_dir) / "verdict.json"


def read_verdict(run_dir: str | Path, attempt: str) -> Verdict | None:
    """The attempt's verdict, if there is one. A damaged file is none."""
    try:
        verdict: Verdict | None = _read(verdict_path(run_dir), Verdict)
    except ValueError:
        return None
    return verdict if verdict is not None and verdict.attempt == attempt else None


def ask_path(run_dir: str | Path) -> Path:
    """Where a request for stacks is."""
    return status_dir(run_dir) / "ask.json"


def read_ask(run_dir: str | Path, attempt: str) -> Ask | None:
    """The attempt's newest request for stacks, if there is one. A damaged file is none."""
    try:
        ask: Ask | None = _read(ask_path(run_dir), Ask)
    except ValueError:
        return None
    return ask if ask is not None and ask.attempt == attempt else None


def begin_attempt(run_dir: str | Path) -> None:
    """Rank 0, before any other rank's watchdog starts: an earlier attempt's files go; its verdict is kept aside."""
    folder = make_private(status_dir(run_dir))
    make_private(stacks_path(run_dir, 0).parent)
    make_private(folder / "alive")
    with suppress(FileNotFoundError):
        verdict_path(run_dir).replace(folder / "verdict-before.json")
    for path in (*folder.glob("rank-*.json"), *folder.glob(".*.json.*"), ask_path(run_dir)):
        path.unlink(missing_ok=True)
