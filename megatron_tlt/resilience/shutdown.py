"""Ending a run on a signal, on all ranks at the same place, with everything saved.

    signal -> thread of one rank (or of all) -> store: "stop" -> every rank's engine hears it between two steps
    rollout   goes on while the step can still be finished in time, else it ends here: the rank is *dry*
    idle      nothing special: the window is over when every rank is dry, for whatever reason
    agree()   all ranks together, between phases: go on, or leave (raised on all of them as `GracefulExit`)

Nobody decides alone: a rank may only cut its own rollout short. Whether the step counts is agreed upon afterwards, in
a collective that every rank enters in every step, signal or not.

The first signal starts the clock (`stop.warning_s`, `stop.term_s`); a second one, not the first one's echo, drops the
unfinished step at once; a third one ends this process on the spot. Batch systems repeat themselves: on preemption Slurm
sends SIGTERM twice and the forwarded SIGUSR1 (measured), so what comes within seconds counts once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_tlt.distributed.signals import StopSignals
from megatron_tlt.errors import BackendError, TltError

if TYPE_CHECKING:
    from megatron_tlt.config.shutdown import ShutdownSection
    from megatron_tlt.distributed.world import World
    from megatron_tlt.interfaces import ProgressCallback
    from megatron_tlt.types import Sample

EXIT_SAVED = 75  # EX_TEMPFAIL of sysexits.h: saved, please start me again
_HEAR_EVERY_S = 0.25
_KEY = "stop"
_EMA = 0.5


class RolloutInterrupted(TltError):  # noqa: N818  as above
    """This rank's rollout was cut short by a signal. Caught around `generate`."""


class GracefulExit(TltError):  # noqa: N818  an orderly end, not a fault
    """All ranks agreed to leave here. Caught by the loop, which saves."""


class GracefulShutdown:
    """One rank's part in ending a run. All ranks make the same `agree` calls."""

    def __init__(
        self,
        world: World,
        section: ShutdownSection,
        signals: StopSignals | None = None,
        agree_in_engine: Callable[[int], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`agree_in_engine` is the highest of the numbers that the ranks of one engine give; collective among them."""
        self._world, self._section, self._clock = world, section, clock
        self._signals = signals if signals is not None else StopSignals(clock)
        self._agree_in_engine = agree_in_engine
        self._heard: float | None = None  # deadline that another rank told
        self._heard_count = 0
        self._heard_keys: set[str] = set()
        self._looked_at = -_HEAR_EVERY_S
        self._rest_s: dict[str, float] = {}  # from each place of `agree` to the end of the step, as measured
        self._marks: dict[str, float] = {}
        self.dropped = False
        self._signals.listener = self._tell
        if self._signals.count:
            self._tell()

    @property
    def is_requested(self) -> bool:
        """Whether this rank knows of a signal, its own or another rank's."""
        return self._deadline() is not None

    def guarded(
        self, generate: Callable[[ProgressCallback], list[Sample]], on_progress: ProgressCallback | None = None
    ) -> tuple[list[Sample], bool]:
        """Answers, and whether a signal cut the rollout short: then there are none.

        `generate` gets the callback that the engine must call between its steps; it calls `on_progress`, too.
        """

        def tell(running: int, waiting: int, generated_tokens: int) -> None:
            self.check_rollout()
            if on_progress is not None:
                on_progress(running, waiting, generated_tokens)

        try:
            return generate(tell), False
        except RolloutInterrupted:
            return [], True
        except BackendError:
            if not self.is_requested:
                raise
            return [], True  # an engine of its own process may have died of the same signal

    def check_rollout(self) -> None:
        """Between two steps of the engine; ranks of one engine call it together. Microseconds.

        Raises RolloutInterrupted when the step cannot be finished in time any more.
        """
        self._hear()
        drop = self._must_drop("rollout")
        if self._agree_in_engine is not None:
            drop = bool(self._agree_in_engine(int(drop)))
        if drop:
            raise RolloutInterrupted("a signal to end came, and the step cannot be finished in time")

    def agree(self, place: str, dropped: bool = False) -> None:
        """Between two phases of a step: whether all ranks go on. Collective, some bytes.

        `dropped` says that this rank's rollout was cut short. Raises GracefulExit on every rank if any was, or if
        what is left of the step does not fit into the time any more. `place` names the phase: how long the rest of a
        step takes from there is measured.
        """
        self._marks[place] = self._clock()
        self._hear(now=True)
        drop = dropped or self._must_drop(place)
        if self._shared(drop):
            self.dropped = True
            raise GracefulExit("the unfinished step is dropped")

    def agree_at_end(self) -> None:
        """After a step, when all is as a checkpoint wants it. Collective. Raises GracefulExit after any signal."""
        now = self._clock()
        for place, since in self._marks.items():
            old = self._rest_s.get(place, now - since)
            self._rest_s[place] = old + _EMA * (now - since - old)
        self._marks.clear()
        self._hear(now=True)
        if self._shared(self.is_requested):
            raise GracefulExit("the step is done")

    def close(self) -> None:
        """The store is about to go: later signals are nobody's business. Signals stay taken."""
        self._signals.listener = None

    def why(self) -> str:
        """What came, for people."""
        names = [
            name
            for name, at in (("SIGUSR1", self._signals.warned_at), ("SIGTERM", self._signals.term_at))
            if at is not None
        ]
        return " and ".join(names) if names else "a signal on another rank"

    def _deadline(self) -> float | None:
        times = [t for t in (self._signals.deadline(self._section), self._heard) if t is not None]
        return min(times) if times else None

    def _must_drop(self, place: str) -> bool:
        """Whether the time that is left is too short for the rest of the step and a checkpoint."""
        deadline = self._deadline()
        if deadline is None:
            return False
        if max(self._signals.count, self._heard_count) > 1:
            return True
        return self._clock() + self._rest_s.get(place, 0.0) + self._section.save_s > deadline

    def _shared(self, mine: bool) -> bool:
        flag = torch.tensor([int(mine)])
        if self._world.size > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def _tell(self) -> None:
        """Tells every rank, from the thread that hears signals."""
        deadline = self._signals.deadline(self._section)
        if deadline is None or self._world.size == 1:
            return
        left = deadline - self._clock()
        keys = [str(min(self._signals.count, 2))]
        if (
            self._signals.term_at is not None
        ):  # within the first one's echo it counts as that one, but is sooner
            keys.append("term")
        with suppress(RuntimeError):  # the store is gone: so is the run
            for key in keys:
                self._world.store.set(f"{_KEY}/{key}", f"{left:.3f}")

    def _hear(self, now: bool = False) -> None:
        """What other ranks told; a look at the store now and then."""
        time_now = self._clock()
        if self._world.size == 1 or (not now and time_now - self._looked_at < _HEAR_EVERY_S):
            return
        self._looked_at = time_now
        for name, count in (("1", 1), ("2", 2), ("term", 0)):
            key = f"{_KEY}/{name}"
            if name not in self._heard_keys and self._world.store.check([key]):
                left = float(self._world.store.get(key))
                self._heard_keys.add(name)
                self._heard_count = max(count, self._heard_count)
                heard = time_now + left
                self._heard = heard if self._heard is None else min(self._heard, heard)
