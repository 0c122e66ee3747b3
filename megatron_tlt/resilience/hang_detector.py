"""Which ranks hang, which are slow, and how long a phase should take. Pure: no clock, no files. Stdlib only."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_tlt.errors import shortened
from megatron_tlt.resilience.heartbeat import Heartbeat

_MIN_DURATIONS = 3  # of a phase, without which nothing is expected of it
_PROCESS_STATES = {"T": " [stopped]", "t": " [stopped]", "D": " [waiting in the kernel]", "R": " [computing]"}
_SEVERITY = (
    "killed", "hung", "failed", "lost", "stopped", "silent", "slow", "running", "ended", "saved", "done"
)  # fmt: skip


def phase_limit(durations: Sequence[float], factor: float, least: float) -> float:
    """Seconds that a phase should not exceed, from earlier ones' seconds; 0 while there are too few.

    At least `factor` medians, because one hour-long evaluation or one hang must not hide the next, and `least`.
    """
    return max(factor * statistics.median(durations), least) if len(durations) >= _MIN_DURATIONS else 0.0


def aged(beat: Heartbeat, seconds: float) -> Heartbeat:
    """The heartbeat so many seconds later."""
    if not beat.is_running or seconds <= 0:
        return beat
    return replace(
        beat, phase_seconds=beat.phase_seconds + seconds, silent_seconds=beat.silent_seconds + seconds
    )


def find_hung(beats: Iterable[Heartbeat], hang_s: float) -> list[Heartbeat]:
    """The ranks that the job hangs on; empty while it does not hang.

    Most silent ranks only wait in a collective for one that works. So a rank hangs that is silent for `hang_s` while no
    rank at its phase or behind it shows signs of life, except waiting ones. Of those, the furthest behind are returned.
    """
    running = [beat for beat in beats if beat.is_running]
    silent = [beat for beat in running if beat.silent_seconds >= hang_s]
    working = [beat.order for beat in running if beat.silent_seconds < hang_s and not beat.is_waiting]
    first = min(working, default=None)
    return furthest_behind(beat for beat in silent if first is None or beat.order < first)


def find_slow(beats: Iterable[Heartbeat]) -> list[Heartbeat]:
    """Of the ranks furthest behind, for which the others wait, those whose phase takes longer than it should."""
    return [beat for beat in furthest_behind(beats) if _is_slow(beat)]


def furthest_behind(beats: Iterable[Heartbeat]) -> list[Heartbeat]:
    """The running ranks that have entered the fewest phases."""
    running = [beat for beat in beats if beat.is_running]
    last = min((beat.order for beat in running), default=0)
    return [beat for beat in running if beat.order == last]


def condition(beat: Heartbeat, age: float) -> str:
    """One word of `_SEVERITY` on a heartbeat that was written `age` seconds ago.

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
    return "slow" if _is_slow(beat) else "running"


def severity(row: tuple[Heartbeat, str]) -> tuple[int, int, float, int]:
    """Sorts heartbeats with their conditions: the gravest, then those furthest behind, then the longest silent."""
    return _SEVERITY.index(row[1]), row[0].order, -row[0].silent_seconds, row[0].rank


def name_of(beat: Heartbeat) -> str:
    """Rank, host and process, for messages."""
    return f"rank {beat.rank} (host {beat.host}, pid {beat.pid})"


def phase_of(beat: Heartbeat) -> str:
    """Phase and step, for messages."""
    return f"phase {beat.phase}, step {beat.step}"


def describe(beats: Sequence[Heartbeat]) -> str:
    """Ranks with what they do, for messages; at most 16."""
    parts = [
        f"{name_of(b)} in {phase_of(b)}, silent for {b.silent_seconds:.0f} s{_PROCESS_STATES.get(b.process, '')}"
        for b in beats
    ]
    return shortened(parts, 16, "; ")


def _is_slow(beat: Heartbeat) -> bool:
    return 0 < beat.limit_seconds < beat.phase_seconds and not beat.is_waiting
