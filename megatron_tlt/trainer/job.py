"""`Job`: a training from its checkpoint to its end. RL, fine-tuning and the training of a drafter are jobs.

load -> begin -> [ step -> save where due ] ... -> finish
                    a signal, or an error of every rank alike: a checkpoint of the last finished step
"""

from __future__ import annotations

import logging
import shutil
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from megatron_tlt.distributed.processors import processor
from megatron_tlt.errors import CheckpointError, ConfigError, SharedError
from megatron_tlt.observe.runfiles import CHANGES_FILE, CONFIG_FILE
from megatron_tlt.resilience.shutdown import GracefulExit
from megatron_tlt.trainer.run_record import write_config

if TYPE_CHECKING:
    from megatron_tlt.checkpoint.manager import CheckpointManager
    from megatron_tlt.config.root import TrainingConfig
    from megatron_tlt.distributed.world import World
    from megatron_tlt.observe.progress import ProgressDisplay
    from megatron_tlt.resilience.shutdown import GracefulShutdown

_log = logging.getLogger(__name__)

State: TypeAlias = dict[str, Any]


class Job(ABC):
    """One rank of a training. Every method but `note` is collective."""

    name: ClassVar[str]
    """Begins its lines."""
    config: TrainingConfig
    world: World
    num_steps: int
    checkpoints: CheckpointManager
    shutdown: GracefulShutdown
    progress: ProgressDisplay | None = None
    _loaded: int | None = None  # step of the checkpoint that this start goes on from

    @property
    @abstractmethod
    def done(self) -> int:
        """Finished steps."""

    @property
    def state_dir(self) -> Path:
        """The directory from which it goes on. It is made where it is missing."""
        return self.config.state_dir

    @abstractmethod
    def load(self, state: State | None) -> None:
        """Goes on from `state`; None: from the beginning. Raises CheckpointError."""

    @abstractmethod
    def begin(self) -> bool:
        """What comes before the first step of this start; False: an earlier start has done all. Raises GracefulExit."""

    @abstractmethod
    def step(self) -> None:
        """One step. Raises GracefulExit where a signal drops it."""

    @abstractmethod
    def state_dict(self) -> State:
        """The state after the last finished step, for `load`."""

    @abstractmethod
    def finish(self) -> None:
        """What comes after the last step."""

    def held_out_fingerprint(self) -> dict[str, str]:
        """Fingerprint of the held-out rows, by the field that names them."""
        return {}

    def unsaved(self) -> str | None:
        """Why the state is not saved, and where the next start goes on; None: it is saved."""
        return None

    def saved(self) -> State | None:
        """The state to go on from; None: from the beginning. Raises CheckpointError."""
        return self.checkpoints.load_latest()

    def mark_start(self) -> None:
        """Makes the next start, where this one ends before its first save, go on from the same state. Rank 0 only."""
        self.checkpoints.mark_start()

    def save(self) -> None:
        """Saves the last finished step; returns when it is on disk."""
        self.checkpoints.save_now(self.done, self.state_dict)

    def save_if_due(self) -> None:
        """After a step. Raises TrainingError where no further step makes sense."""
        with self.phase("checkpoint"):
            self.checkpoints.maybe_save(self.done, self.state_dict, self.unsaved() is None)
        self.shutdown.note_save(self.checkpoints.save_s)

    def is_complete(self) -> bool:
        """Whether only `finish` is left."""
        return self.done >= self.num_steps

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A phase between two steps, named in errors."""
        self.world.enter(name, self.done)
        return nullcontext()

    def note(self, text: str) -> None:
        """A line of rank 0."""
        if self.world.is_main:
            print(f"{self.name} {text}", flush=True)

    def run(self) -> bool:
        """Trains to the last step. Returns whether a signal ended the job before; what is done is then saved.

        Raises ConfigError where the checkpoint to resume from is refused, and what the methods above raise.
        """
        self._resume()
        try:
            if not self.begin():
                return False
            while self.done < self.num_steps:
                self.step()
                self.save_if_due()
                self.shutdown.sync_after_step()
        except GracefulExit as reason:
            if not self.is_complete():
                self._leave(reason)
                return True
        except SharedError:  # finished steps would be lost
            self._keep()
            raise
        finally:
            if self.progress is not None:
                self.progress.close()
        self.finish()
        return False

    def _resume(self) -> None:
        """Loads the checkpoint to resume from, if there is one; only after that the configuration is recorded. A named
        checkpoint that is only evaluated leaves the record of the run.
        """
        try:
            self.world.enter("load")
            state = self.saved()
            self.load(state)
            if state is not None:
                self.world.enter("load", self.done)
        except CheckpointError as error:
            raise ConfigError.of("checkpoint.resume", self.config.checkpoint.resume, str(error)) from error
        self.world.accept()
        step = self._loaded = None if state is None else self.done
        has_drafter = state is not None and state.get("drafter") is not None
        has_steps = self.done < self.num_steps
        if self.world.is_main and has_steps:
            self.mark_start()  # first: what follows removes the rows of later steps
        is_kept = self.config.checkpoint.resume != "auto" and (self.state_dir / CONFIG_FILE).exists()
        if self.world.is_main and (has_steps or not (is_kept or self.is_complete())):
            kind, held_out = processor(self.world.device), self.held_out_fingerprint()
            if changed := write_config(self.config, self.state_dir, step, kind, has_drafter, held_out):
                what = f"{', '.join(sorted(changed))} (values: {CHANGES_FILE})"
                _log.warning("the run goes on with other settings, code or processor than at its last start: %s", what)
        self.world.barrier()

    def _keep(self) -> str | None:
        """Saves the last finished step; the unfinished one leaves no trace in it. Returns why not, see `unsaved`."""
        unsaved = self.unsaved()
        with self.phase("checkpoint"):
            if unsaved is None:
                self.save()
            else:
                self.checkpoints.wait()
        return unsaved

    def _leave(self, reason: GracefulExit) -> None:
        """Saves, and says where the next start goes on."""
        unsaved = self._keep()
        # Another value begins anew, or at the checkpoint that it names, and the first save then removes later ones.
        is_there = self.config.checkpoint.resume == "auto" or self.done == self._loaded
        needs = "" if is_there else " with checkpoint.resume=auto"
        then = unsaved or f"saved after step {self.done}, the next start goes on there{needs}"
        self.note(f"{self.shutdown.reason()}: {reason}; {then}")
        ended = f"ended by a signal after step {self.done} of {self.num_steps}"
        self.world.ends_early(unsaved is None, f"{ended}; {unsaved or f'saved, the same command goes on{needs}'}")

    def remove_state(self) -> None:
        """Removes `state_dir`, which then is no state to go on from, whatever is left of it: by a kill, or of a file
        that NFS keeps while it is open. Rank 0 only.
        """
        removed = self.state_dir.with_name(f".{self.state_dir.name}")
        shutil.rmtree(removed, ignore_errors=True)
        try:
            self.state_dir.rename(removed)
        except OSError as error:  # the result is written: no reason to fail
            _log.warning("%s could not be removed: %s", self.state_dir, error)
        shutil.rmtree(removed, ignore_errors=True)

    def close(self) -> None:
        """Frees its parts; the checkpoints last, for from there on another job may use their directory."""
        self.shutdown.close()
        self.checkpoints.close()
