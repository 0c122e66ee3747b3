"""The status board: what rank 0 (and a sub-leader of its members) last heard of each rank. Torch-free, MPI-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_tlt.errors import shortened
from megatron_tlt.idle.policy import BusyReplica, expected_tail
from megatron_tlt.idle.state import RankState

if TYPE_CHECKING:
    from megatron_tlt.idle.messages import Report
    from megatron_tlt.interfaces import Clock


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the board."""

    rank: int
    report: Report | None
    """The newest; None: never heard of."""
    silent_seconds: float
    """Since it was heard (since the board was made, if never)."""

    @property
    def state(self) -> RankState | None:
        """Its state when last heard of; None: never."""
        return None if self.report is None else self.report.state

    def is_done(self, epoch: int) -> bool:
        """Whether it ran dry in window `epoch` and takes nothing over any more, or is beyond it."""
        r = self.report
        if r is None or r.epoch < epoch:
            return False
        return r.epoch > epoch or (r.state is not RankState.BUSY and not r.asks)

    def __str__(self) -> str:
        if self.report is None:
            return f"rank {self.rank} (never heard)"
        r = self.report
        said = f"window {r.epoch}, heard {self.silent_seconds:.1f} s ago"
        if r.state is RankState.BUSY:
            said += f", {r.running} requests, {r.tokens_left:.0f} tokens left"
        elif r.asks:
            said += ", asks for work"
        elif r.steps:
            said += f", {r.steps} micro-steps"
        return f"rank {self.rank} ({said})"


class StatusBoard:
    """Newest reports of the ranks that speak, and whom the present window waits for."""

    def __init__(self, ranks: Iterable[int], clock: Clock):
        self._clock = clock
        self._made = clock.now()
        self._reports: dict[int, Report | None] = dict.fromkeys(ranks)
        self._heard: dict[int, float] = {}
        self._via: dict[int, int] = {}
        self.epoch = 0
        self.busy = set(self._reports)

    def begin(self, epoch: int) -> None:
        """Opens window `epoch`: everybody is waited for who has not said that it is done."""
        self.epoch = epoch
        self.busy = {entry.rank for entry in self.entries() if not entry.is_done(epoch)}

    def take(self, report: Report, via: int) -> bool:
        """Notes a report that came from rank `via`; False, changing nothing, if a newer one is there."""
        old = self._reports[report.rank]
        if old is not None and (report.epoch, report.seq) <= (old.epoch, old.seq):
            return False
        self._reports[report.rank] = report
        self._heard[report.rank] = self._clock.now()
        self._via[report.rank] = via
        if self._entry(report.rank).is_done(self.epoch):
            self.busy.discard(report.rank)
        else:
            self.busy.add(report.rank)
        return True

    def tail(self) -> float | None:
        """Seconds until the slowest rank is expected to be done (`policy.expected_tail`)."""
        replicas = []
        for entry in map(self._entry, self.busy):
            r = entry.report
            if r is None or r.epoch < self.epoch:
                return None
            if r.asks:
                continue
            replicas.append(BusyReplica(r.tokens_left, r.tokens_per_second, entry.silent_seconds))
        return expected_tail(replicas)

    def waiting_vias(self) -> set[int]:
        """The ranks through which idle and training ones of this window are reached."""
        found = set()
        for rank, r in self._reports.items():
            if r is not None and r.epoch == self.epoch and r.state is not RankState.BUSY:
                found.add(self._via[rank])
        return found

    def queues(self) -> tuple[list[Report], bool]:
        """Reports of this window's ranks that have a queue; and whether that is all, no rank's being unknown."""
        found, is_all = [], True
        for r in self._reports.values():
            if r is None or r.epoch < self.epoch or r.queued < 0:
                is_all = False
            elif r.epoch == self.epoch and r.queued:
                found.append(r)
        return found, is_all

    def seq_of(self, rank: int) -> int:
        """The number of its newest report; 0: never heard of."""
        report = self._reports[rank]
        return 0 if report is None else report.seq

    def asks(self, rank: int) -> bool:
        """Whether it was dry when last heard of, and could still take requests over."""
        report = self._reports[rank]
        return report is not None and report.asks

    def last_change(self) -> float:
        """Wall time of the newest transition of any rank of this window."""
        return max((r.changed_at for r in self._reports.values() if r and r.epoch == self.epoch), default=0.0)

    def entries(self) -> list[Entry]:
        """All lines, by rank."""
        return [self._entry(rank) for rank in sorted(self._reports)]

    def _entry(self, rank: int) -> Entry:
        silent = self._clock.now() - self._heard.get(rank, self._made)
        return Entry(rank, self._reports[rank], silent)

    def text(self) -> str:
        """Who was last seen in which state, the longest silent first: for error messages."""
        groups: dict[str, list[Entry]] = {}
        for entry in sorted(self.entries(), key=lambda e: -e.silent_seconds):
            groups.setdefault("UNKNOWN" if entry.state is None else entry.state.name, []).append(entry)
        parts = []
        for name in ("UNKNOWN", *(state.name for state in RankState)):
            if members := groups.get(name):
                parts.append(f"{name}: {shortened(members, 16)}")
        return "; ".join(parts)
