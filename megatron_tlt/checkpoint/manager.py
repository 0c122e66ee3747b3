"""Checkpoints of a run: when one is written, its contents, which one a run resumes from.

RUN_DIR/checkpoints/step-000030/
  *.distcp, .metadata, metadata.json, common.pt   policy, optimizer, random states: megatron's torch_dist format
                                                  (`actor/checkpoint.py`)
  manifest.json                                   model, versions, checksums of all files; under `extra` the loop's
                                                  state (`Job.state_dict`): step, position in the prompts,
                                                  evaluations, mean lengths by prompt
  drafter.safetensors                             drafter, its mean and moments (`drafters/state_file.py`)
  carried.jsonl                                   responses that the next step continues (`carried_file.py`)
RUN_DIR/checkpoints/latest                        name of the one that the next start goes on from
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.actor.checkpoint import SaveHandle
from megatron_tlt.actor.checkpoint_files import put_back, read_latest, step_directory, step_of, write_latest
from megatron_tlt.checkpoint.carried_file import CARRIED, carried_writer, read_carried
from megatron_tlt.checkpoint.resume import find_checkpoint
from megatron_tlt.drafters.state_file import DRAFTER_STATE, drafter_state_writer, load_drafter_state
from megatron_tlt.errors import SaveError
from megatron_tlt.observe.attempt import note_checkpoint, note_start

if TYPE_CHECKING:
    from megatron_tlt.actor.policy import MegatronPolicy
    from megatron_tlt.config.run import CheckpointSection
    from megatron_tlt.distributed.world import World
    from megatron_tlt.resilience.run_lock import RunLock

_log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves every `checkpoint.every` steps and after the last one, in the background, one save at a time.

    Every method but `latest` and `close` is collective.
    """

    def __init__(
        self,
        section: CheckpointSection,
        run_dir: Path,
        num_steps: int,
        policy: MegatronPolicy,
        world: World,
        lock: RunLock | None = None,
    ):
        """`lock`: on rank 0 of a job that writes; released by `close`."""
        self._lock = lock
        self._section, self._num_steps, self._policy, self._world = section, num_steps, policy, world
        self._directory = run_dir / "checkpoints"
        self._pending: SaveHandle | None = None
        self.newest: int | None = None
        """Step of the newest checkpoint on this run's path: the last one published, or loaded as `latest`."""
        self._loaded: Path | None = None  # that this start goes on from
        self.save_s = 0.0
        """Seconds that the newest save of this start has taken; 0 before the first."""
        self.is_behind = False
        """The checkpoint of this step lacks something of its state: `save_now` replaces it."""
        self._is_overdue = False  # a save was due at a step that was not good

    def load_latest(self) -> dict[str, Any] | None:
        """Loads the checkpoint of `checkpoint.resume`; returns the loop's state in it, or None for a fresh start.

        Under `carried` are the responses that the next step continues, as `read_carried` returns them, under `drafter`
        the drafter's state, None where there is none. Raises CheckpointError when it is damaged or of another model.
        """
        if self._lock is not None:
            put_back(self._directory)
        resumed = find_checkpoint(self._world, self._directory, self._section.resume)
        if self._world.is_main:
            note_start(0 if resumed is None else step_of(resumed))
        if resumed is None:
            return None
        if resumed.parent.resolve() == self._directory.resolve():  # by whatever path it is named
            resumed = self._directory / resumed.name
        self._loaded = resumed
        # A checkpoint of another run, or from before this run's latest, is no progress of this one.
        if self._world.broadcast_object(read_latest(self._directory) == resumed):
            self._note(resumed)
        state, carried, drafter = self._policy.load(resumed), resumed / CARRIED, resumed / DRAFTER_STATE
        return {
            **state,
            "carried": read_carried(carried) if carried.is_file() else [],
            "drafter": load_drafter_state(drafter) if drafter.is_file() else None,
        }

    def mark_start(self) -> None:
        """Moves `latest` to the checkpoint that this start goes on from, or to none: where it ends before its first
        save, the next start goes on there, too. Rank 0 only, before rows of later steps are removed.
        """
        loaded = self._loaded
        if loaded is not None:
            write_latest(self._directory, loaded.name if loaded.parent == self._directory else str(loaded.absolute()))
        elif self._directory.is_dir():
            write_latest(self._directory, step_directory(self._directory, 0).name)

    def maybe_save(self, step: int, state: Callable[[], dict[str, Any]], good: bool) -> None:
        """Publishes a finished save, and starts one if `step` (steps done) is due, or an earlier one is overdue.

        `state` is called on every rank. It is JSON-able but for `carried`, groups whose responses become a file, and
        `drafter`, a drafter's state or None, of which the first rank's becomes a file. A save that is due at a step
        that is not `good` waits for the next good one. Raises SaveError as `wait` does.
        """
        if (pending := self._pending) is not None:
            self._pending = None  # a failure is raised once
            if pending.poll():
                self._published(pending)
            else:
                self._pending = pending
        self._is_overdue |= self.is_scheduled(step)
        if self._is_overdue and good:
            self._is_overdue = False
            self._start(step, state)
            if not self._section.asynchronous:
                self.wait()

    def is_scheduled(self, step: int) -> bool:
        """Whether a checkpoint belongs behind `step` steps: the last one, or one that `checkpoint.every` asks for."""
        every = self._section.every
        return step == self._num_steps or (bool(every) and step % every == 0)

    def save_now(self, step: int, state: Callable[[], dict[str, Any]], prune: bool = True) -> None:
        """Saves `step` whatever `checkpoint.every` says, unless it is saved, here or where it was loaded from; returns
        when it is on disk.

        Without `prune` no older checkpoint is removed. Where the save under way fails, this one takes its place. Raises
        SaveError.
        """
        try:
            self.wait()
        except SaveError as error:
            if self._world.is_main:
                _log.warning("%s; step %d is saved in its place", error, step)
        loaded = None if self._loaded is None else step_of(self._loaded)
        if self.is_behind or step not in (self.newest, loaded):
            self._start(step, state, prune)
            self.wait()

    def _start(self, step: int, current: Callable[[], dict[str, Any]], prune: bool = True) -> None:
        self.wait()  # a writer slower than the interval delays the run: better than ever more saves in memory
        files, state, self.is_behind = {}, current(), False
        drafter, carried = state.pop("drafter", None), state.pop("carried", ())
        if drafter is not None and self._world.is_main:
            files[DRAFTER_STATE] = drafter_state_writer(drafter)
        if carried and self._world.is_main:
            files[CARRIED] = carried_writer(carried)
        target = step_directory(self._directory, step)
        self._pending = self._policy.start_save(target, state, self._section.keep if prune else None, files)

    def wait(self) -> None:
        """Publishes the save under way, if there is one. Raises SaveError, once, where it fails."""
        if (pending := self._pending) is not None:
            self._pending = None
            pending.wait()
            self._published(pending)

    def close(self) -> None:
        """Releases the lock of the run directory."""
        if self._lock is not None:
            self._lock.release()

    def _published(self, save: SaveHandle) -> None:
        self.save_s = save.seconds
        self._note(save.directory)

    def _note(self, directory: Path) -> None:
        self.newest = step_of(directory)
        if self._world.is_main:
            note_checkpoint(self.newest)

    def latest(self) -> Path | None:
        """The newest complete checkpoint on this run's path, or the one that it goes on from."""
        return self._loaded if self.newest is None else step_directory(self._directory, self.newest)
