"""The status board of rank 0: the newest report of each replica. Torch-free, MPI-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron_tlt.idle.policy import BusyReplica, expected_wait
from megatron_tlt.idle.state import RankState

if TYPE_CHECKING:
    from megatron_tlt.idle.messages import Report
    from megatron_tlt.interfaces import Clock


def is_done(report: Report | None, epoch: int) -> bool:
    """Whether a replica has no request left in window `epoch` and steals no more, or is in a later window."""
    if report is None or report.epoch < epoch:
        return False
    return report.epoch > epoch or (report.state is not RankState.BUSY and not report.is_requesting)


class StatusBoard:
    """Newest reports of group leaders, and which of them are not done with the present window."""

    def __init__(self, ranks: Iterable[int], clock: Clock):
        self._clock = clock
        self._reports: dict[int, Report | None] = dict.fromkeys(ranks)
        self._received_at: dict[int, float] = {}
        self.epoch = 0
        self.busy = set(self._reports)

    def begin(self, epoch: int) -> None:
        """Opens window `epoch`: all ranks that have not reported being done are busy."""
        self.epoch = epoch
        self.busy = {rank for rank, report in self._reports.items() if not is_done(report, epoch)}

    def update(self, report: Report) -> None:
        """Stores a report; one of an earlier window counts as none."""
        if report.epoch < self.epoch:
            return
        rank = report.rank
        self._reports[rank], self._received_at[rank] = report, self._clock.now()
        if is_done(report, self.epoch):
            self.busy.discard(rank)
        else:
            self.busy.add(rank)

    def expected_wait(self) -> float | None:
        """Seconds until the slowest rank is expected to be done (`policy.expected_wait`)."""
        replicas, now = [], self._clock.now()
        for rank in self.busy:
            r = self._reports[rank]
            if r is None or r.epoch < self.epoch:
                return None
            if not r.is_requesting:
                age = now - self._received_at[rank]
                replicas.append(BusyReplica(r.tokens_left, r.tokens_per_second, age))
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
