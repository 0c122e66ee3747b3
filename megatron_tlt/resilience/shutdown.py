"""Ending a run on a signal, on all ranks at the same place, with everything saved.

    signal -> thread of one rank (or of all) -> store -> every rank sees it between two steps of its engine
    rollout   goes on while the step can still be finished in time, else it is interrupted: no requests are left
    idle      nothing special: the window is over when every rank has no requests left, for whatever reason
    sync()    all ranks together, between phases: go on, or exit (`GracefulExit` is raised on all of them)

A rank alone may only interrupt its own rollout. Whether the step counts is decided afterwards, in a collective that
every rank enters in every step, with a signal or without.

The first signal starts the clock (`stop.warning_s`, `stop.term_s`); a second one, not the first one's echo, drops the
unfinished step at once; a third one ends the process.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from signal import Signals
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_tlt.errors import BackendError, TltError
from megatron_tlt.resilience.signals import StopSignals

if TYPE_CHECKING:
    from megatron_tlt.config.run import ShutdownSection
    from megatron_tlt.distributed.world import World
    from megatron_tlt.types import GenerateCall, Sample

STORE_KEY = "shutdown"  # a line for each signal: its count, and the seconds until the deadline
_LOOK_EVERY_S = 0.25  # between looks at the store in a rollout: a look is a round trip to rank 0
_NEW_SHARE = 0.5  # of the newest step in the running mean of how long the rest of a step takes
_log = logging.getLogger(__name__)


class RolloutInterrupted(TltError):  # noqa: N818  an orderly end, not a fault
    """A signal interrupted this rank's rollout. Caught around `generate`."""


class GracefulExit(TltError):  # noqa: N818  an orderly end, not a fault
    """All ranks exit here. Caught by the loop, which saves."""


class GracefulShutdown:
    """One rank's part in ending a run. All ranks make the same `sync` calls."""

    def __init__(
        self,
        world: World,
        section: ShutdownSection,
        signals: StopSignals | None = None,
        max_over_engine: Callable[[int], int] = int,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`max_over_engine`: maximum of a number over the ranks of one engine; collective among them."""
        self._world, self._section, self._clock = world, section, clock
        self._signals = signals if signals is not None else StopSignals(clock)
        self._max_over_engine = max_over_engine
        self._remote_deadline, self._remote_count, self._num_received = math.inf, 0, 0
        self._looked_at = -math.inf
        self._rest_s: dict[str, float] = {}  # from each place of `sync` to the end of the step, as measured
        self._reached_at: dict[str, float] = {}
        self._save_s = section.save_s  # or as measured, if that is more
        self.has_dropped_step = False
        self._warned_of: set[str] = set()
        if world.size > 1:
            self._signals.on_signal(self._publish)

    @property
    def is_requested(self) -> bool:
        """Whether this rank has seen a signal, its own or another rank's."""
        return self._deadline() < math.inf

    def reason(self) -> str:
        """Which signals came, for people."""
        names = [Signals(number).name for number in sorted(self._signals.first_at)]
        return " and ".join(names) or "a signal on another rank"

    def interruptible(
        self,
        generate: Callable[[GenerateCall], list[Sample]],
        call: GenerateCall,
    ) -> tuple[list[Sample], bool]:
        """(`generate(call)`, False), or ([], True) if a signal interrupted it, which is seen between two steps."""
        try:
            return generate(replace(call, check_interrupt=self.check_rollout)), False
        except RolloutInterrupted:
            return [], True
        except BackendError:
            if not self.is_requested:
                raise
            return [], True  # an engine in a process of its own may have died of the same signal

    def check_rollout(self) -> None:
        """Between two steps of the engine; ranks of one engine call it together. Microseconds.

        Raises RolloutInterrupted when the step cannot be finished in time any more.
        """
        self._receive()
        if self._max_over_engine(int(self._is_too_late("rollout"))):
            raise RolloutInterrupted("a signal to end came, and the step cannot be finished in time")

    def sync(self, place: str, interrupted: bool = False) -> None:
        """Between two phases of a step. Collective, some bytes.

        Raises GracefulExit on every rank if any rank's rollout was `interrupted`, or if the rest of the step does not
        fit into the time any more. `place` names the phase: how long the rest of a step takes from there is measured.
        """
        self._reached_at[place] = self._clock()
        self._receive(now=True)
        if self._any_rank(interrupted or self._is_too_late(place)):
            self.has_dropped_step = True
            raise GracefulExit(f"the unfinished {'evaluation' if place == 'eval' else 'step'} is dropped")

    def step_done(self) -> None:
        """A step has ended, before its evaluation and checkpoint: measures how long its rest took from each place of
        `sync`. Mutates.
        """
        now = self._clock()
        for place, since in self._reached_at.items():
            old = self._rest_s.get(place, now - since)
            self._rest_s[place] = old + _NEW_SHARE * (now - since - old)
        self._warn_if_long("an update", self._rest_s.get("update", 0.0))
        self._reached_at.clear()

    def sync_after_step(self) -> None:
        """After a step, when a checkpoint could be written. Collective. Raises GracefulExit after any signal."""
        self.step_done()  # of an evaluation
        self._receive(now=True)
        if self._any_rank(self.is_requested):
            raise GracefulExit("between two steps")

    def note_save(self, seconds: float) -> None:
        """A checkpoint has taken `seconds`, on every rank the same: a step leaves the next one as long. Mutates."""
        section = self._section
        if seconds > section.save_s and "a save" not in self._warned_of and self._world.is_main:
            is_late = seconds > section.term_s
            late = f"; after SIGTERM (stop.term_s = {section.term_s:g}) none is finished" if is_late else ""
            _log.warning(
                "a checkpoint took %.0f s, more than stop.save_s = %g: from now on a step that would leave less is "
                "dropped at a signal%s; set stop.save_s, and deadlines well above it",
                seconds, section.save_s, late,
            )  # fmt: skip
            self._warned_of.add("a save")
        self._save_s = max(section.save_s, seconds)

    @contextmanager
    def unwatched(self, what: str) -> Iterator[None]:
        """A part of a step in which this rank looks for no signal; a warning if it is too long for that."""
        began = self._clock()
        yield
        self._warn_if_long(what, self._clock() - began)

    def _warn_if_long(self, what: str, seconds: float) -> None:
        """A signal that comes as `what` begins must leave it the time to end, and a checkpoint."""
        needed = seconds + self._save_s
        if needed > self._section.warning_s and what not in self._warned_of and self._world.is_main:
            _log.warning(
                "%s and a checkpoint take %.0f s, more than stop.warning_s = %g: where a signal comes as that begins, "
                "the job is killed before it can save; set stop.warning_s and the lead of `sbatch --signal` higher",
                what, needed, self._section.warning_s,
            )  # fmt: skip
            self._warned_of.add(what)

    def close(self) -> None:
        """Before the store goes: later signals are not published. Their handlers stay."""
        self._signals.on_signal(None)

    def _deadline(self) -> float:
        own = self._signals.deadline(self._section)
        return self._remote_deadline if own is None else min(own, self._remote_deadline)

    def _is_too_late(self, place: str) -> bool:
        """Whether the time that is left is too short for the rest of the step and a checkpoint."""
        if max(self._signals.count, self._remote_count) > 1:
            return True
        return self._clock() + self._rest_s.get(place, 0.0) + self._save_s > self._deadline()

    def _any_rank(self, mine: bool) -> bool:
        flag = torch.tensor([int(mine)])
        if self._world.size > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def _publish(self) -> None:
        """Appends a signal to the store, from the thread that noted it. Clocks of two hosts are never compared."""
        seconds_left = self._deadline() - self._clock()
        with suppress(RuntimeError):  # the store is gone, and so is the run
            line = f"{self._signals.count} {seconds_left:.3f}\n"
            self._world.store.append(STORE_KEY, line)  # type: ignore[attr-defined]  # missing in the stubs of torch

    def _receive(self, now: bool = False) -> None:
        """Reads other ranks' signals, now and then or `now`."""
        time_now = self._clock()
        if self._world.size == 1 or (not now and time_now - self._looked_at < _LOOK_EVERY_S):
            return
        self._looked_at = time_now
        if not self._world.store.check([STORE_KEY]):
            return
        lines = self._world.store.get(STORE_KEY).decode().splitlines()
        for line in lines[self._num_received :]:
            count, seconds_left = line.split()
            self._remote_count = max(self._remote_count, int(count))
            self._remote_deadline = min(self._remote_deadline, time_now + float(seconds_left))
        self._num_received = len(lines)
