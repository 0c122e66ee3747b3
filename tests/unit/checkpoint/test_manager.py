"""When a run's checkpoints are written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_tlt.checkpoint.manager import CheckpointManager
from megatron_tlt.config.run import CheckpointSection
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.errors import SaveError, SharedError
from tests.unit.actor.test_checkpoint_files import published


class Save:
    """A `SaveHandle` that is done at once, or fails whenever it is looked at."""

    seconds = 30.0

    def __init__(self, directory: Path, fails: bool):
        self.directory, self._fails = directory, fails

    def poll(self) -> bool:
        self.wait()
        return True

    def wait(self) -> None:
        if self._fails:
            raise SaveError(f"cannot write {self.directory}")


def manager(folder: Path, failing: set[int], resume: str = "auto") -> tuple[CheckpointManager, list[str]]:
    """With a save due every two steps; and the directories of the saves that were begun, of which the numbers in
    `failing` fail.
    """
    begun: list[str] = []

    def start_save(target: Path, state: Any, keep: int | None, files: Any) -> Save:
        begun.append(target.name if keep else f"{target.name} beside all others")
        return Save(target, len(begun) - 1 in failing)

    policy: Any = SimpleNamespace(start_save=start_save, load=lambda path: {})
    section = CheckpointSection(every=2, resume=resume)
    return CheckpointManager(section, folder, 9, policy, SingleProcess()), begun  # type: ignore[arg-type]


def test_a_signal_behind_a_save_that_fails_saves_the_last_finished_step(tmp_path, caplog):
    checkpoints, begun = manager(tmp_path, {0})
    checkpoints.maybe_save(2, dict, good=True)
    checkpoints.save_now(3, dict)
    assert begun == ["step-000002", "step-000003"] and (checkpoints.newest, checkpoints.save_s) == (3, 30.0)
    assert "step-000002; step 3 is saved in its place" in caplog.text


def test_a_save_that_may_not_prune_removes_no_older_checkpoint(tmp_path):
    checkpoints, begun = manager(tmp_path, set())
    checkpoints.save_now(3, dict, prune=False)
    checkpoints.save_now(4, dict)
    assert begun == ["step-000003 beside all others", "step-000004"]


def test_a_save_that_fails_is_an_error_of_every_rank_once_and_the_next_save_is_tried(tmp_path):
    checkpoints, begun = manager(tmp_path, {0, 1})
    checkpoints.maybe_save(2, dict, good=True)
    with pytest.raises(SharedError):
        checkpoints.maybe_save(3, dict, good=True)
    with pytest.raises(SaveError, match="step-000003"):
        checkpoints.save_now(3, dict)
    checkpoints.wait()
    checkpoints.save_now(3, dict)
    assert begun == ["step-000002", "step-000003", "step-000003"] and checkpoints.newest == 3


@pytest.mark.parametrize(("step", "done"), [(2, 0), (2, 1), (6, 0)])
def test_a_checkpoint_that_was_loaded_is_saved_again_by_no_start_without_a_step(tmp_path, step, done):
    """Which ends by a signal, or has only evaluated: a save removes the checkpoints of later steps."""
    directories = {number: published(tmp_path / "checkpoints", number) for number in (2, 4, 6)}
    checkpoints, begun = manager(tmp_path, set(), resume=str(directories[step]))
    checkpoints.load_latest()
    checkpoints.save_now(step + done, dict)
    assert begun == (["step-000003"] if done else [])


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_new_run_is_marked_by_no_file(tmp_path, resume):
    start, _ = manager(tmp_path, set(), resume=resume)
    start.load_latest()
    start.mark_start()
    assert not list(tmp_path.iterdir())
