"""The status board of rank 0: the newest report of each replica. Torch-free, MPI-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron_tlt.idle.state import RankState

if TYPE_CHECKING:
    from megatron_tlt.idle.messages import Report


def is_done(report: Report | None, epoch: int) -> bool:
    """Whether a replica has no request left in window `epoch` and steals no more, or is in a later window."""
    if report is None or report.epoch < epoch:
        return False
    return report.epoch > epoch or (report.state is not RankState.BUSY and not report.is_requesting)


class StatusBoard:
    """Newest reports of group leaders, and which of them are not done with the present window."""

    def __init__(self, ranks: Iterable[int]):
        self._reports: dict[int, Report | None] = dict.fromkeys(ranks)
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
        self._reports[report.rank] = report
        if is_done(report, self.epoch):
            self.busy.discard(report.rank)
        else:
            self.busy.add(report.rank)

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
        """Wall time at which the last rank of this window was done."""
        return max((r.changed_at for r in self._reports.values() if r and r.epoch == self.epoch), default=0.0)
