"""Coordination of idle ranks: a non-blocking barrier over MPI, and one shared counter of finished replicas.

    rank 0   rollout ==============================|count, Ibarrier|            the last one: R of R replicas
    rank 1   rollout =========|count, Ibarrier|step|look|step|look|step| out
    rank 2   rollout ============|count, Ibarrier|zz|look|zz|look|zz| out       look: counter (every 20 ms), barrier

Who waits for whom: no call waits for another rank but the constructor and `close`. Every rank enters the barrier when
its replica has no request left; a rank leaves the window when its barrier tests complete. The counter is advice: a
non-blocking barrier goes through log2(ranks) rounds, and a rank that trains takes part in one round a micro-step. With
the counter every rank stops after the micro-step it is in, at most 20 ms late, and the rounds that are left go at the
pace of `test_done`.

The counter lives in the key-value store of the job (`World.new_counter`), which a thread of rank 0 serves, whatever
rank 0 does. A counter in an MPI window would not be served while its rank computes, unless the network has RDMA.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_tlt.config.dims import is_first_of_engine
from megatron_tlt.observe.clock import wall_seconds

if TYPE_CHECKING:
    from mpi4py import MPI

LOOK_S = 0.02  # between two looks at the counter: some microseconds of rank 0's store each


class IdleCoordinator:
    """One rank's part, on a communicator of its own. Not thread-safe; no thread of its own."""

    def __init__(
        self,
        comm: MPI.Comm,
        count: Callable[[int], int],
        *,
        group_size: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = wall_seconds,
    ):
        """Duplicates `comm`. Collective. `count`: a counter of the coordinators of all ranks (`World.new_counter`).

        `group_size` consecutive ranks are one replica: its first rank counts, all of them enter the barrier.
        """
        self._comm = comm.Dup()
        self._count, self._clock, self._wall = count, clock, wall
        self._is_group_leader = is_first_of_engine(comm.rank, group_size)
        self._num_replicas = comm.size // group_size
        self._barrier: MPI.Request | None = None
        self._is_over = True
        self._looked_at = 0.0
        self.windows = 0
        """Windows that this rank has entered."""
        self.entered_at = 0.0
        """Wall time at which this rank entered the newest one."""

    @property
    def is_over(self) -> bool:
        """Whether every replica is known to be done: training stops. Leaving needs `test_done`."""
        return self._is_over

    def enter_done(self) -> None:
        """This replica has no request left: enters the done barrier of the next window. Returns at once."""
        assert self._barrier is None, "the last window is open: test_done has not been true yet"
        self.windows += 1
        self.entered_at = self._wall()  # read before the barrier: no rank leaves before the last rank's
        self._barrier = self._comm.Ibarrier()
        self._look(int(self._is_group_leader))

    def test_done(self) -> bool:
        """Tests the barrier: True when every rank has entered, and this one may leave. Microseconds."""
        if self._barrier is not None and self._barrier.Test():
            self._barrier, self._is_over = None, True
        if not self._is_over and self._clock() - self._looked_at >= LOOK_S:
            self._look(0)
        return self._barrier is None

    def close(self) -> None:
        """Frees the communicator. Collective outside a window; in one, where the job ends by MPI_Abort, nothing."""
        if self._barrier is None:
            self._comm.Free()

    def _look(self, more: int) -> None:
        """Adds `more` to the counter. A replica that counts in the next window has seen the end of this one."""
        self._looked_at = self._clock()
        self._is_over = self._count(more) >= self.windows * self._num_replicas
