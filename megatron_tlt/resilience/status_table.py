"""A run's state for people and for programs, from its status files. Changes nothing. Stdlib only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_tlt.resilience import hang_detector as judge
from megatron_tlt.resilience import status_files as files

_HEADINGS = (
    "rank", "host", "pid", "condition", "phase", "step", "for", "limit", "silent", "running", "queued", "longest",
    "left",
)  # fmt: skip
_GRAVE = ("killed", "hung", "failed", "lost")


@dataclass(frozen=True)
class RunStatus:
    """What the status files say of one run."""

    rows: list[tuple[files.Beat, str]]
    """Ranks with their conditions (`judge.condition`), worst first."""
    verdict: files.Verdict | None
    """Why the job ended, if somebody said so."""
    missing: list[int] = field(default_factory=list)
    """Ranks without a status."""
    problems: list[str] = field(default_factory=list)
    """Damaged files."""

    @property
    def condition(self) -> str:
        """The run in a word: running, finished, crashed, hung, lost, unknown.

        Also saved or ended: orderly, before its end.
        """
        here = {said for _, said in self.rows}
        if not here:
            return "unknown"
        if self.verdict is not None:
            return "hung" if self.verdict.kind == "hung" else "crashed"
        for word, means in (("hung", "hung"), ("killed", "crashed"), ("failed", "crashed"), ("lost", "lost")):
            if word in here:
                return means
        if here <= {"done", "saved", "ended"}:
            return "finished" if here == {"done"} else "saved" if "saved" in here else "ended"
        return "running"


def read_status(run_dir: str | Path, now: float | None = None) -> RunStatus:
    """The state of a run; `now` is wall time (default: now). Hosts' clocks must agree to a few heartbeats.

    Status files of more than one attempt belong to a start that is under way: the newest counts.
    """
    now = time.time() if now is None else now
    beats, problems = files.read_beats(run_dir)
    if not beats:
        return RunStatus([], None, problems=problems)
    newest = max(beats.values(), key=lambda beat: beat.written_at)
    mine = {rank: beat for rank, beat in beats.items() if beat.attempt == newest.attempt}
    rows = []
    for beat in mine.values():
        age = max(0.0, now - beat.written_at)
        rows.append((judge.older(beat, age), judge.condition(judge.older(beat, age), age)))
    missing = [rank for rank in range(newest.size) if rank not in mine]
    verdict = files.read_verdict(run_dir, newest.attempt)
    return RunStatus(judge.worst_first(rows), verdict, missing, problems)


def as_json(status: RunStatus) -> dict[str, Any]:
    """The state as JSON: `condition`, `verdict`, `ranks` (worst first), `missing`, `problems`."""
    return {
        "condition": status.condition,
        "verdict": None if status.verdict is None else asdict(status.verdict),
        "ranks": [asdict(beat) | {"condition": said} for beat, said in status.rows],
        "missing": status.missing,
        "problems": status.problems,
    }


def render(run_dir: str | Path, status: RunStatus, top: int = 0, now: float | None = None) -> str:
    """The state as text: a line on the run, then a table of the `top` worst ranks (0: all)."""
    now = time.time() if now is None else now
    if not status.rows:
        return "\n".join([f"{run_dir}: no status files", *status.problems])
    lines = [_headline(run_dir, status, now)]
    if status.verdict is not None:
        lines.append(status.verdict.text)
    elif status.condition in ("saved", "ended"):
        lines += sorted({beat.detail for beat, _ in status.rows if beat.detail})
    details = {f"rank {b.rank}: {b.detail}" for b, said in status.rows if b.detail and said in _GRAVE}
    lines += sorted(
        d for d in details if status.verdict is None or status.verdict.kind not in ("killed", "failed")
    )
    if status.missing:
        lines.append(f"no status of rank {', '.join(map(str, status.missing))}")
    shown = status.rows[:top] if top else status.rows
    lines += ["", *_table([_cells(beat, said) for beat, said in shown])]
    if len(shown) < len(status.rows):
        lines.append(f"and {len(status.rows) - len(shown)} more (--all)")
    with_stacks = [beat.rank for beat, _ in status.rows if beat.stacks]
    if with_stacks:
        folder = files.stacks_path(run_dir, 0).parent
        lines += ["", f"stacks of {len(with_stacks)} of {status.rows[0][0].size} ranks: {folder}/rank-N.txt"]
    return "\n".join([*lines, *status.problems])


def _headline(run_dir: str | Path, status: RunStatus, now: float) -> str:
    beats = [beat for beat, _ in status.rows]
    hosts = len({beat.host for beat in beats})
    heard = max(0.0, now - max(beat.written_at for beat in beats))
    step = max(beat.step for beat in beats)
    return (
        f"{run_dir}: {status.condition}, step {step}; {len(beats)} of {beats[0].size} ranks on {hosts} "
        f"host{'s' if hosts > 1 else ''}, last heard of {_seconds(heard)} ago"
    )


def _cells(beat: files.Beat, said: str) -> list[str]:
    phase = f"{beat.phase} ({beat.state})" if beat.state else beat.phase
    is_rollout = bool(beat.running or beat.queued)
    numbers = [beat.running, beat.queued, beat.longest, round(beat.left)] if is_rollout else [""] * 4
    limit = _seconds(beat.limit_seconds) if beat.limit_seconds else ""
    times = [_seconds(beat.phase_seconds), limit, _seconds(beat.silent_seconds)]
    return [str(c) for c in (beat.rank, beat.host, beat.pid, said, phase, beat.step, *times, *numbers)]


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they need; numbers on the right."""
    every = [_HEADINGS, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(_HEADINGS))]
    left = {1, 3, 4}
    return [
        "  ".join(
            c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))
        ).rstrip()
        for row in every
    ]
