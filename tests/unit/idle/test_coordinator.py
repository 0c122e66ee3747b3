"""Coordinators of several ranks in one process: a barrier that a test completes, a counter in an array."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from megatron_tlt.idle.coordinator import LOOK_S, IdleCoordinator


@dataclass
class Barrier:
    complete: bool = False

    def Test(self) -> bool:
        return self.complete


@dataclass
class Comm:
    """The communicator of one rank, and its own duplicate."""

    rank: int
    size: int
    barriers: list[Barrier] = field(default_factory=list)
    freed: bool = False

    def Dup(self) -> Comm:
        return self

    def Free(self) -> None:
        self.freed = True

    def Ibarrier(self) -> Barrier:
        self.barriers.append(Barrier())
        return self.barriers[-1]


@dataclass
class Ranks:
    """Coordinators that share a clock and a counter."""

    size: int
    group_size: int = 1
    time: float = 0.0
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.comms = [Comm(rank, self.size) for rank in range(self.size)]
        self.all = [
            IdleCoordinator(c, self.count, group_size=self.group_size, clock=lambda: self.time, wall=lambda: 7.0)
            for c in self.comms
        ]

    def count(self, more: int) -> int:
        self.counts.append(more)
        return sum(self.counts)


def test_training_stops_at_the_first_look_after_the_last_replica_has_ended():
    ranks = Ranks(3)
    first, second, last = ranks.all
    for window in (1, 2, 3):
        first.enter_done()
        second.enter_done()
        assert (first.windows, first.entered_at) == (window, 7.0)
        ranks.time += 1
        assert not first.test_done() and not first.is_over
        last.enter_done()
        assert last.is_over, "it has counted as the last one"
        ranks.time += LOOK_S / 2
        assert not first.test_done() and not first.is_over, "no look yet"
        ranks.time += LOOK_S
        assert not first.test_done() and first.is_over
        asked = len(ranks.counts)
        assert not first.test_done() and len(ranks.counts) == asked, "nothing is left to ask"
        for comm, coordinator in zip(ranks.comms, ranks.all, strict=True):
            comm.barriers[-1].complete = True
            assert coordinator.test_done() and coordinator.is_over, "the barrier alone ends the window too"


def test_a_rank_that_is_late_sees_the_end_although_others_are_a_window_further():
    ranks = Ranks(2)
    late, fast = ranks.all
    late.enter_done()
    fast.enter_done()
    ranks.comms[1].barriers[-1].complete = True
    assert fast.test_done()
    fast.enter_done()
    ranks.time += LOOK_S
    assert not late.test_done() and late.is_over
    assert not fast.is_over


def test_one_rank_of_a_replica_counts():
    ranks = Ranks(4, group_size=2)
    for coordinator in ranks.all:
        coordinator.enter_done()
    assert sum(ranks.counts) == 2
    assert [c.is_over for c in ranks.all] == [False, False, True, True]


def test_misuse_and_an_end_within_a_window():
    ranks = Ranks(1)
    (coordinator,) = ranks.all
    coordinator.enter_done()
    with pytest.raises(AssertionError, match="the last window is open"):
        coordinator.enter_done()
    coordinator.close()
    assert not ranks.comms[0].freed, "others may be in the barrier"
    ranks.comms[0].barriers[-1].complete = True
    assert coordinator.test_done()
    coordinator.close()
    assert ranks.comms[0].freed
