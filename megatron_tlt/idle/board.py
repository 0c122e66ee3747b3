"""The status board of rank 0: the newest report of each replica. Torch-free, MPI-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_tlt.errors import shortened
from megatron_tlt.idle.policy import BusyReplica, expected_wait
from megatron_tlt.idle.state import RankState

if TYPE_CHECKING:
    from megatron_tlt.idle.messages import Report
    from megatron_tlt.interfaces import Clock

_MAX_SHOWN = 16  # ranks of one state in a message


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the board."""

    rank: int
    report: Report | None
    """The newest one; None: none has come."""
    silent_seconds: float
    """Age of the report (of the board, if none has come)."""

    @property
    def state(self) -> RankState | None:
        """Its last reported state; None: none."""
        return None if self.report is None else self.report.state

    def is_done(self, epoch: int) -> bool:
        """Whether it has no request left in window `epoch` and steals no more, or is in a later window."""
        r = self.report
        if r is None or r.epoch < epoch:
            return False
        return r.epoch > epoch or (r.state is not RankState.BUSY and not r.is_requesting)

    def __str__(self) -> str:
        r = self.report
        if r is None:
            return f"rank {self.rank} (no report yet)"
        text = f"window {r.epoch}, last report {self.silent_seconds:.1f} s ago"
        if r.state is RankState.BUSY:
            text += f", {r.running} requests, {r.tokens_left:.0f} tokens left"
        elif r.is_requesting:
            text += ", requests work"
        elif r.steps:
            text += f", {r.steps} micro-steps"
        return f"rank {self.rank} ({text})"


class StatusBoard:
    """Newest reports of group leaders, and which of them are not done with the present window."""

    def __init__(self, ranks: Iterable[int], clock: Clock):
        self._clock = clock
        self._made_at = clock.now()
        self._reports: dict[int, Report | None] = dict.fromkeys(ranks)
        self._received_at: dict[int, float] = {}
        self.epoch = 0
        self.busy = set(self._reports)

    def begin(self, epoch: int) -> None:
        """Opens window `epoch`: all ranks that have not reported being done are busy."""
        self.epoch = epoch
        self.busy = {entry.rank for entry in self.entries() if not entry.is_done(epoch)}

    def update(self, report: Report) -> None:
        """Stores a report; one of an earlier window counts as none."""
        if report.epoch < self.epoch:
            return
        rank = report.rank
        self._reports[rank], self._received_at[rank] = report, self._clock.now()
        if self._entry(rank).is_done(self.epoch):
            self.busy.discard(rank)
        else:
            self.busy.add(rank)

    def expected_wait(self) -> float | None:
        """Seconds until the slowest rank is expected to be done (`policy.expected_wait`)."""
        replicas = []
        for entry in map(self._entry, self.busy):
            r = entry.report
            if r is None or r.epoch < self.epoch:
                return None
            if not r.is_requesting:
                replicas.append(BusyReplica(r.tokens_left, r.tokens_per_second, entry.silent_seconds))
        return expected_wait(replicas)

    def idle_ranks(self) -> list[int]:
        """Ranks that are idle or training in this window."""
        present = [r for r in self._reports.values() if r is not None and r.epoch == self.epoch]
        return [r.rank for r in present if r.state is not RankState.BUSY]

    def queues(self) -> tuple[list[Report], bool]:
        """Reports of this window's ranks that have a queue; and whether the queues of all ranks are known."""
        found, is_complete = [], True
        for r in self._reports.values():
            if r is None or r.epoch < self.epoch or r.queued < 0:
                is_complete = False
            elif r.epoch == self.epoch and r.queued:
                found.append(r)
        return found, is_complete

    def report_of(self, rank: int) -> Report | None:
        """The newest report of `rank`; None: none has come."""
        return self._reports[rank]

    def last_change(self) -> float:
        """Wall time of the newest transition of any rank of this window."""
        return max((r.changed_at for r in self._reports.values() if r and r.epoch == self.epoch), default=0.0)

    def entries(self) -> list[Entry]:
        """All lines, by rank."""
        return [self._entry(rank) for rank in sorted(self._reports)]

    def _entry(self, rank: int) -> Entry:
        silent = self._clock.now() - self._received_at.get(rank, self._made_at)
        return Entry(rank, self._reports[rank], silent)

    def text(self) -> str:
        """All ranks by state, those with the oldest report first: for error messages."""
        groups: dict[str, list[Entry]] = {}
        for entry in sorted(self.entries(), key=lambda e: -e.silent_seconds):
            groups.setdefault("UNKNOWN" if entry.state is None else entry.state.name, []).append(entry)
        names = [name for name in ("UNKNOWN", *(state.name for state in RankState)) if name in groups]
        return "; ".join(f"{name}: {shortened(groups[name], _MAX_SHOWN)}" for name in names)
