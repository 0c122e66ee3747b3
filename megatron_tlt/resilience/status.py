"""A run's state as text and as JSON, from its status files. Stdlib only."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_tlt.config.checks.files import maker_of
from megatron_tlt.errors import aligned, printable, shortened
from megatron_tlt.resilience.status_files import JobEnd, RankStatus, StatusFiles

_HEADINGS = (
    "rank", "host", "pid", "condition", "phase", "step", "for", "limit", "silent", "running", "queued", "longest",
    "left",
)  # fmt: skip
_LEFT_ALIGNED = (1, 3, 4)
_WORST_FIRST = ("hung", "killed", "failed", "lost", "slow", "running", "ended", "saved", "done")
# The first of these conditions that a rank has, or why the job ended, decides.
_OF_RUN = {"hung": "hung", "killed": "crashed", "failed": "crashed", "lost": "lost"}


@dataclass(frozen=True)
class RankRow:
    """One rank as it is now."""

    status: RankStatus
    condition: str
    """One of `_WORST_FIRST`. lost: neither the rank nor its watchdog has written for long, as when a host is gone."""
    phase_seconds: float
    silent_seconds: float
    """Since the last sign of life."""


@dataclass(frozen=True)
class RunStatus:
    """The state of one run, from its status files."""

    rows: list[RankRow]
    """Worst first."""
    end: JobEnd | None
    """Why the job ended, if a rank is at fault."""
    missing: list[int] = field(default_factory=list)
    """Ranks without a status file."""
    problems: list[str] = field(default_factory=list)
    """Damaged files."""

    @property
    def condition(self) -> str:
        """The run in a word: running, finished, crashed, hung, lost, unknown; saved, ended: orderly, before its end."""
        found = {row.condition for row in self.rows}
        if not found:
            return "unknown"
        reasons = found if self.end is None else {self.end.outcome}
        for reason, condition in _OF_RUN.items():
            if reason in reasons:
                return condition
        if found <= {"done", "saved", "ended"}:
            return "finished" if found == {"done"} else "saved" if "saved" in found else "ended"
        return "running"

    @property
    def reasons(self) -> list[str]:
        """Why a run ended before its last step, a line each; of one that runs, what its ranks say."""
        if self.end is not None:
            return [self.end.text]
        if self.condition == "finished":
            return []
        return sorted({row.status.detail for row in self.rows if row.status.detail})

    def as_json(self) -> dict[str, Any]:
        """`condition`, `end`, `ranks` (worst first), `missing`, `problems`."""
        ranks = []
        for row in self.rows:
            tree = asdict(row)
            ranks.append(tree.pop("status") | tree)
        return {
            "condition": self.condition,
            "end": None if self.end is None else asdict(self.end),
            "ranks": ranks,
            "missing": self.missing,
            "problems": self.problems,
        }


def read_status(run_dir: str | Path, now: float | None = None) -> RunStatus:
    """The state of a run; `now` is wall time (default: now). Hosts' clocks must agree to a few heartbeats.

    Files of more than one start belong to a start that is under way: the newest counts.
    """
    now = time.time() if now is None else now
    files = StatusFiles(run_dir)
    ranks, problems = files.read_ranks()
    if not ranks:
        return RunStatus([], None, problems=problems)
    newest = max(ranks.values(), key=lambda status: status.written_at)
    mine = {rank: status for rank, status in ranks.items() if status.start == newest.start}
    end = files.read_end(newest.start)
    seen = {first: _touched(files.host(first)) for first in {status.first for status in mine.values()}}
    rows = [_row(status, end, seen[status.first], now) for status in mine.values()]
    rows.sort(key=lambda r: (_WORST_FIRST.index(r.condition), -r.silent_seconds, r.status.rank))
    missing = [rank for rank in range(newest.size) if rank not in mine]
    return RunStatus(rows, end, missing, problems)


def _row(status: RankStatus, end: JobEnd | None, watchdog_at: float, now: float) -> RankRow:
    """`watchdog_at`: when the watchdog of the rank's host last wrote."""
    until = now if end is None else min(now, end.at)
    if status.outcome != "running":
        until = status.written_at
    phase_seconds = max(0.0, until - status.phase_at)
    silent_seconds = max(0.0, until - status.written_at)
    return RankRow(status, _condition(status, end, watchdog_at, phase_seconds, now), phase_seconds, silent_seconds)


def _condition(status: RankStatus, end: JobEnd | None, watchdog_at: float, phase_seconds: float, now: float) -> str:
    if end is not None and status.rank in end.ranks:
        return end.outcome
    if status.outcome != "running":
        return status.outcome
    if end is not None:
        return "ended"
    if now - max(watchdog_at, status.written_at) > 5 * status.heartbeat_s + 10:
        return "lost"
    is_waiting = status.phase == "idle" or status.state == "IDLE"
    return "slow" if 0 < status.limit_seconds < phase_seconds and not is_waiting else "running"


def _touched(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def status_text(run_dir: str | Path, status: RunStatus, top: int = 0, now: float | None = None) -> str:
    """The state as text: a line on the run, then a table of the `top` worst ranks (0: all)."""
    now = time.time() if now is None else now
    if not status.rows:
        maker = maker_of(Path(run_dir))
        whose = "" if maker in (None, "train") else f": `{maker}` made it, and only a run of `train` has them"
        return printable("\n".join([f"{run_dir}: no status files{whose}", *status.problems]))
    lines = [_headline(run_dir, status, now)]
    lines += status.reasons
    if status.missing:
        lines.append(f"no status of rank {shortened(status.missing)}")
    shown = status.rows[:top] if top else status.rows
    lines += ["", *aligned([_HEADINGS, *map(_cells, shown)], _LEFT_ALIGNED)]
    if len(shown) < len(status.rows):
        lines.append(f"and {len(status.rows) - len(shown)} more (--all)")
    if status.condition == "hung":
        lines += ["", f"stacks: {StatusFiles(run_dir).stacks}/rank-N.txt"]
    return printable("\n".join([*lines, *status.problems]))


def _headline(run_dir: str | Path, status: RunStatus, now: float) -> str:
    ranks = [row.status for row in status.rows]
    hosts = len({rank.host for rank in ranks})
    age = max(0.0, now - max(rank.written_at for rank in ranks))
    step = max(rank.step for rank in ranks)
    at = f"step {step}" if step >= 0 else "before its first step"
    return (
        f"{run_dir}: {status.condition}, {at}; {len(ranks)} of {ranks[0].size} ranks on {hosts} "
        f"host{'s' if hosts > 1 else ''}, last sign of life {_seconds(age)} ago"
    )


def _cells(row: RankRow) -> list[str]:
    rank = row.status
    phase = f"{rank.phase} ({rank.state})" if rank.state else rank.phase
    is_rollout = bool(rank.running or rank.queued)
    numbers = [rank.running, rank.queued, rank.longest, round(rank.left)] if is_rollout else [""] * 4
    limit = _seconds(rank.limit_seconds) if rank.limit_seconds else ""
    times = [_seconds(row.phase_seconds), limit, _seconds(row.silent_seconds)]
    step = rank.step if rank.step >= 0 else ""
    return [str(c) for c in (rank.rank, rank.host, rank.pid, row.condition, phase, step, *times, *numbers)]


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"
