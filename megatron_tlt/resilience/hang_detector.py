"""Who is stuck, who is slow, and how long a phase should take. Pure: no clock, no files. Stdlib only."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from megatron_tlt.errors import shortened
from megatron_tlt.resilience.status_files import Beat

_FEWEST = 3  # durations without which there is no expectation
_SPREADS = 6.0
_TO_SIGMA = 1.4826  # from a median absolute deviation, if durations were normal
_SEVERITY = (
    "killed", "hung", "failed", "lost", "stopped", "silent", "slow", "running", "ended", "saved", "done"
)  # fmt: skip


def limit_of(durations: Sequence[float], factor: float, least: float) -> float:
    """Seconds that a phase should not exceed, from earlier ones' seconds; 0 while there are too few.

    Medians, because one hour-long evaluation or one hang must not hide the next: at least `factor` medians, six
    deviations above the median, and `least`.
    """
    if len(durations) < _FEWEST:
        return 0.0
    middle = statistics.median(durations)
    spread = _TO_SIGMA * statistics.median(abs(d - middle) for d in durations)
    return max(factor * middle, middle + _SPREADS * spread, least)


class Tracker:
    """Ages beats by when they were seen to change, so that no two clocks are ever compared."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}

    def aged(self, beats: Mapping[int, Beat], now: float) -> list[Beat]:
        """The beats with their seconds as of `now` (of the reader's monotonic clock), at least."""
        out = []
        for rank, beat in beats.items():
            seq, since = self._seen.get(rank, (-1, now))
            if seq != beat.seq:
                since = now
                self._seen[rank] = (beat.seq, now)
            out.append(older(beat, now - since))
        return out

    def forget(self) -> None:
        """The reader was asleep itself: what seems old to it need not be."""
        self._seen.clear()


def older(beat: Beat, seconds: float) -> Beat:
    """The beat, so many seconds later."""
    if not beat.is_running or seconds <= 0:
        return beat
    return replace(
        beat,
        phase_seconds=beat.phase_seconds + seconds,
        silent_seconds=beat.silent_seconds + seconds,
    )


def stuck(beats: Iterable[Beat], hang_s: float) -> list[Beat]:
    """The ranks that the job hangs on; empty while it does not hang.

    Most silent ranks only wait for one that works, in a collective that they have reached before it. So a rank is
    stuck that is silent for `hang_s` and has nobody at its phase or behind it who shows signs of life. A rank that is
    idle works for nobody, however lively. Of those, the ones that are furthest behind are named.
    """
    here = [beat for beat in beats if beat.is_running]
    silent = [beat for beat in here if beat.silent_seconds >= hang_s]
    working = [beat.order for beat in here if beat.silent_seconds < hang_s and not beat.is_waiting]
    first = min(working, default=None)
    found = [beat for beat in silent if first is None or beat.order < first]
    last = min((beat.order for beat in found), default=0)
    return [beat for beat in found if beat.order == last]


def slow(beats: Iterable[Beat]) -> list[Beat]:
    """The ranks whose phase takes longer than it should; of these the furthest behind, the others wait for them."""
    here = [beat for beat in beats if beat.is_running]
    last = min((beat.order for beat in here), default=0)
    return [b for b in here if b.order == last and 0 < b.limit_seconds < b.phase_seconds and not b.is_waiting]


def condition(beat: Beat, age: float) -> str:
    """One word on a beat that was written `age` seconds ago: see `_SEVERITY`.

    lost: neither the rank nor its watchdog has written for long, as when a host is gone.
    """
    if not beat.is_running:
        return beat.outcome
    if age > 5 * beat.heartbeat_s + 10:
        return "lost"
    if beat.process in ("T", "t"):
        return "stopped"
    if beat.hang_s and beat.silent_seconds > beat.hang_s / 2:
        return "silent"
    if 0 < beat.limit_seconds < beat.phase_seconds and not beat.is_waiting:
        return "slow"
    return "running"


def worst_first(rows: Iterable[tuple[Beat, str]]) -> list[tuple[Beat, str]]:
    """Beats with their conditions: the gravest, then those furthest behind, then the longest silent."""
    return sorted(
        rows,
        key=lambda row: (_SEVERITY.index(row[1]), row[0].order, -row[0].silent_seconds, row[0].rank),
    )


def place(beat: Beat) -> str:
    """Who and where, for messages."""
    return f"rank {beat.rank} (host {beat.host}, pid {beat.pid})"


def where(beat: Beat) -> str:
    """In which phase, for messages."""
    return f"phase {beat.phase}, step {beat.step}"


def listed(beats: Sequence[Beat]) -> str:
    """Ranks with what they do, for messages; at most 16."""
    parts = [
        f"{place(b)} in {where(b)}, silent for {b.silent_seconds:.0f} s{_process(b.process)}" for b in beats
    ]
    return shortened(parts, 16, separator="; ")


def _process(letter: str) -> str:
    said = {"T": "stopped", "t": "stopped", "D": "waiting in the kernel", "R": "computing"}.get(letter)
    return f" [{said}]" if said else ""
