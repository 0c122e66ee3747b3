"""A run's state as text and as JSON, from its status files. Stdlib only."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_tlt.errors import aligned, shortened
from megatron_tlt.resilience import hang_detector as detector
from megatron_tlt.resilience.heartbeat import Heartbeat, JobEnd, StatusFiles

_HEADINGS = (
    "rank", "host", "pid", "condition", "phase", "step", "for", "limit", "silent", "running", "queued", "longest",
    "left",
)  # fmt: skip
_LEFT_ALIGNED = (1, 3, 4)
# The first of these that a rank has, or why the job ended, decides.
_OF_RUN = {"hung": "hung", "killed": "crashed", "failed": "crashed", "lost": "lost"}


@dataclass(frozen=True)
class RunStatus:
    """What the status files say of one run."""

    rows: list[tuple[Heartbeat, str]]
    """Ranks with their conditions (`hang_detector.condition`), worst first."""
    end: JobEnd | None
    """Why the job ended, if a rank is at fault."""
    missing: list[int] = field(default_factory=list)
    """Ranks without a heartbeat."""
    problems: list[str] = field(default_factory=list)
    """Damaged files."""

    @property
    def condition(self) -> str:
        """The run in a word: running, finished, crashed, hung, lost, unknown; saved, ended: orderly, before its end."""
        found = {condition for _, condition in self.rows}
        if not found:
            return "unknown"
        reasons = found if self.end is None else {self.end.outcome}
        for reason, condition in _OF_RUN.items():
            if reason in reasons:
                return condition
        if found <= {"done", "saved", "ended"}:
            return "finished" if found == {"done"} else "saved" if "saved" in found else "ended"
        return "running"

    def as_json(self) -> dict[str, Any]:
        """`condition`, `end`, `ranks` (worst first), `missing`, `problems`."""
        return {
            "condition": self.condition,
            "end": None if self.end is None else asdict(self.end),
            "ranks": [asdict(beat) | {"condition": condition} for beat, condition in self.rows],
            "missing": self.missing,
            "problems": self.problems,
        }


def read_status(run_dir: str | Path, now: float | None = None) -> RunStatus:
    """The state of a run; `now` is wall time (default: now). Hosts' clocks must agree to a few heartbeats.

    Heartbeats of more than one start belong to a start that is under way: the newest counts.
    """
    now = time.time() if now is None else now
    files = StatusFiles(run_dir)
    beats, problems = files.read_heartbeats()
    if not beats:
        return RunStatus([], None, problems=problems)
    newest = max(beats.values(), key=lambda beat: beat.written_at)
    mine = {rank: beat for rank, beat in beats.items() if beat.start_id == newest.start_id}
    rows = []
    for beat in mine.values():
        age = max(0.0, now - beat.written_at)
        aged = detector.aged(beat, age)
        rows.append((aged, detector.condition(aged, age)))
    missing = [rank for rank in range(newest.size) if rank not in mine]
    return RunStatus(sorted(rows, key=detector.severity), files.read_end(newest.start_id), missing, problems)


def render(
    run_dir: str | Path, status: RunStatus, top: int = 0, now: float | None = None, hint: str = "--all"
) -> str:
    """The state as text: a line on the run, then a table of the `top` worst ranks (0: all); `hint`: what shows all."""
    now = time.time() if now is None else now
    if not status.rows:
        return "\n".join([f"{run_dir}: no status files", *status.problems])
    lines = [_headline(run_dir, status, now)]
    beats = [beat for beat, _ in status.rows]
    if status.end is not None:
        lines.append(status.end.text)
    elif status.condition != "finished":
        lines += sorted({beat.detail for beat in beats if beat.detail})
    if status.missing:
        lines.append(f"no status of rank {shortened(status.missing)}")
    shown = status.rows[:top] if top else status.rows
    rows = [_cells(beat, condition) for beat, condition in shown]
    lines += ["", *aligned([_HEADINGS, *rows], _LEFT_ALIGNED)]
    if len(shown) < len(status.rows):
        lines.append(f"and {len(status.rows) - len(shown)} more ({hint})")
    if count := sum(bool(beat.stacks) for beat in beats):
        folder = StatusFiles(run_dir).stacks
        lines += ["", f"stacks of {count} of {beats[0].size} ranks: {folder}/rank-N.txt"]
    return "\n".join([*lines, *status.problems])


def _headline(run_dir: str | Path, status: RunStatus, now: float) -> str:
    beats = [beat for beat, _ in status.rows]
    hosts = len({beat.host for beat in beats})
    age = max(0.0, now - max(beat.written_at for beat in beats))
    step = max(beat.step for beat in beats)
    at = f"step {step}" if step >= 0 else "before its first step"
    return (
        f"{run_dir}: {status.condition}, {at}; {len(beats)} of {beats[0].size} ranks on {hosts} "
        f"host{'s' if hosts > 1 else ''}, last heartbeat {_seconds(age)} ago"
    )


def _cells(beat: Heartbeat, condition: str) -> list[str]:
    phase = f"{beat.phase} ({beat.state})" if beat.state else beat.phase
    is_rollout = bool(beat.running or beat.queued)
    numbers = [beat.running, beat.queued, beat.longest, round(beat.left)] if is_rollout else [""] * 4
    limit = _seconds(beat.limit_seconds) if beat.limit_seconds else ""
    times = [_seconds(beat.phase_seconds), limit, _seconds(beat.silent_seconds)]
    step = beat.step if beat.step >= 0 else ""
    return [str(c) for c in (beat.rank, beat.host, beat.pid, condition, phase, step, *times, *numbers)]


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"
