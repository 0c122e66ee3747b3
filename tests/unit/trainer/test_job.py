"""A job's way from its checkpoint to its end, with steps that only count."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_tlt.checkpoint.manager import CheckpointManager
from megatron_tlt.checkpoint.resume import find_checkpoint
from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import Config
from megatron_tlt.config.run import CheckpointSection
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.errors import CheckpointError, OpeningError, PromptError, SaveError, TrainingError, UnjudgedError
from megatron_tlt.observe.runfiles import CHANGES_FILE, CONFIG_FILE
from megatron_tlt.resilience.shutdown import GracefulExit
from megatron_tlt.trainer.job import Job
from tests.unit.actor.test_checkpoint_files import published


class Kept:
    """A `CheckpointManager` that keeps one state in memory; a save is due every two steps."""

    save_s = 30.0

    def __init__(self, state: dict[str, Any] | None = None):
        self.state, self.is_open, self.is_waited_for = state, True, False

    def load_latest(self) -> dict[str, Any] | None:
        return self.state

    def mark_start(self) -> None:
        pass

    def maybe_save(self, step: int, state: Any, good: bool) -> None:
        if step % 2 == 0 and good:
            self.state = state()

    def save_now(self, step: int, state: Any) -> None:
        self.state = state()

    def wait(self) -> None:
        self.is_waited_for = True

    def close(self) -> None:
        self.is_open = False


class Signals:
    """A `GracefulShutdown` whose signal drops the update of step `within`, or is seen after step `after`."""

    def __init__(self, within: int = -1, after: int = -1):
        self.within, self.after, self.steps, self.save_s = within, after, 0, 0.0

    def sync(self, step: int) -> None:
        if step == self.within:
            raise GracefulExit("the unfinished step is dropped")

    def sync_after_step(self) -> None:
        self.steps += 1
        if self.steps == self.after:
            raise GracefulExit("the step is done")

    def note_save(self, seconds: float) -> None:
        self.save_s = seconds

    def reason(self) -> str:
        return "SIGTERM"

    def close(self) -> None:
        pass


class Counting(Job):
    name = "count"

    def __init__(self, folder: Path, kept: Kept, shutdown: Signals, good: bool = True, resume: str = "auto"):
        given = [f"train.run_dir={folder}", f"checkpoint.resume={resume}"]
        self.config = build_config({"model": {"path": "m"}}, given, Config)
        ends = self.ended = []
        self.world = SimpleNamespace(is_main=True, enter=lambda *_: None, accept=lambda: None, barrier=lambda: None,
                                     device=torch.device("cpu"), ends_early=lambda *end: ends.append(end))  # fmt: skip
        self.checkpoints, self.shutdown, self.num_steps = kept, shutdown, 4
        self.count, self.finished, self.is_good = 0, False, good

    @property
    def done(self) -> int:
        return self.count

    def load(self, state: dict[str, Any] | None) -> None:
        if state is not None and state["count"] > self.num_steps:
            raise CheckpointError("too far")
        self.count = 0 if state is None else state["count"]

    def begin(self) -> bool:
        return True

    def step(self) -> None:
        self.shutdown.sync(self.count + 1)
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def unsaved(self) -> str | None:
        return None if self.is_good else "not good; the next start begins anew"

    def finish(self) -> None:
        self.finished = True


@pytest.mark.parametrize("signal", [{"within": 4}, {"after": 3}])
def test_a_signal_saves_the_last_finished_step_and_the_next_start_goes_on(signal, tmp_path, capsys):
    stopped = Counting(tmp_path, Kept(), Signals(**signal))
    assert stopped.run() and not stopped.finished
    assert stopped.checkpoints.state == {"count": 3} and stopped.shutdown.save_s == Kept.save_s
    assert "; saved after step 3, the next start goes on there" in capsys.readouterr().out
    assert stopped.ended == [(True, "ended by a signal after step 3 of 4; saved, the same command goes on")]
    resumed = Counting(tmp_path, stopped.checkpoints, Signals())
    assert not resumed.run() and resumed.finished and resumed.shutdown.steps == 1
    resumed.close()
    assert not resumed.checkpoints.is_open


def test_other_settings_than_at_the_last_start_are_a_warning(tmp_path, caplog):
    stopped = Counting(tmp_path, Kept(), Signals(after=3))
    stopped.run()
    for lr, warnings in ((1e-6, 0), (0.5, 1)):
        resumed = Counting(tmp_path, Kept(stopped.checkpoints.state), Signals())
        section = resumed.config.optimizer.model_copy(update={"lr": lr})
        resumed.config = resumed.config.model_copy(update={"optimizer": section})
        resumed.run()
        assert len(caplog.messages) == warnings
    assert caplog.messages[0].endswith(": optimizer.lr (values: config_changes.jsonl)")


def test_a_start_without_steps_left_leaves_the_record_of_the_last_one(tmp_path):
    """It may be at an earlier step than that, which `checkpoint.resume` names."""
    Counting(tmp_path, Kept(), Signals()).run()
    record = (tmp_path / CONFIG_FILE).read_bytes()
    again = Counting(tmp_path, Kept({"count": 4}), Signals(), resume="checkpoints/step-000004")
    assert not again.run() and (tmp_path / CONFIG_FILE).read_bytes() == record


def test_an_evaluation_of_an_earlier_checkpoint_leaves_record_and_changes(tmp_path):
    Counting(tmp_path, Kept(), Signals()).run()
    (tmp_path / CHANGES_FILE).write_text('{"step":3,"changed":{"optimizer.lr":[0.5,0.25]}}\n')
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    job = Counting(tmp_path, Kept({"count": 2}), Signals(), resume="checkpoints/step-000002")
    job.num_steps, job.is_complete = 2, lambda: False  # an evaluation is due
    job.run()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("given", ["never", "run/checkpoints/step-000002", "elsewhere/checkpoints/step-000002"])
@pytest.mark.parametrize("kill", ["load", "begin", "step"])
def test_a_start_that_is_killed_before_its_first_save_is_not_undone_by_the_next(tmp_path, given, kill):
    """Where it had removed rows of later steps; no checkpoint goes before there is a new one."""
    own = tmp_path / "run/checkpoints"
    there = [published(directory, step) for directory in (own, tmp_path / "elsewhere/checkpoints") for step in (2, 4)]
    (own.parent / CHANGES_FILE).write_text('{"step":3,"changed":{}}\n')
    wanted = None if given == "never" else tmp_path / given
    resume, world = str(wanted or given), SingleProcess()
    policy = SimpleNamespace(load=lambda directory: {"count": int(directory.name[-1])})
    section = CheckpointSection(resume=resume)
    job = Counting(own.parent, CheckpointManager(section, own.parent, 4, policy, world), Signals(), resume=resume)

    def killed(*args: Any) -> bool:
        raise KeyboardInterrupt

    setattr(job, kill, killed)
    with pytest.raises(KeyboardInterrupt):
        job.run()
    is_marked = kill != "load"  # until then a start may be refused
    assert find_checkpoint(world, own, "auto") == (wanted if is_marked else there[1])
    assert bool((own.parent / CHANGES_FILE).read_text()) != is_marked
    assert all(directory.is_dir() for directory in there)


def test_held_out_rows_that_changed_are_a_warning(tmp_path, caplog):
    state = None
    for rows, expected in (("a", []), ("a", []), ("b", ["held_out.data.eval (other rows)"])):
        job = Counting(tmp_path, Kept(state), Signals(after=1))
        job.held_out_fingerprint = lambda rows=rows: {"data.eval": rows}
        job.run()
        state = job.checkpoints.state
        assert [text.partition("last start: ")[2].partition(" (values")[0] for text in caplog.messages] == expected


def test_what_begins_anew_goes_on_with_resume_auto_only(tmp_path, capsys):
    job = Counting(tmp_path, Kept(), Signals(after=3), resume="never")
    assert job.run()
    needed = "the next start goes on there with checkpoint.resume=auto"
    assert f"; saved after step 3, {needed}\n" in capsys.readouterr().out
    goes_on = "saved, the same command goes on with checkpoint.resume=auto"
    assert job.ended == [(True, f"ended by a signal after step 3 of 4; {goes_on}")]


def test_a_signal_before_any_step_leaves_the_named_checkpoint_to_the_same_command(tmp_path):
    job = Counting(tmp_path, Kept({"count": 2}), Signals(within=3), resume="checkpoints/step-000002")
    assert job.run()
    assert job.ended == [(True, "ended by a signal after step 2 of 4; saved, the same command goes on")]


def test_after_the_last_step_a_signal_changes_nothing(tmp_path):
    job = Counting(tmp_path, Kept(), Signals(after=4))
    assert not job.run() and job.finished and not job.ended


def test_a_state_that_is_not_good_is_not_saved(tmp_path, capsys):
    job = Counting(tmp_path, Kept(), Signals(after=3), good=False)
    assert job.run() and job.checkpoints.state is None
    assert "count SIGTERM: the step is done; not good" in capsys.readouterr().out
    assert job.ended == [(False, "ended by a signal after step 3 of 4; not good; the next start begins anew")]


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("error", [TrainingError, UnjudgedError, OpeningError, PromptError, SaveError])
def test_an_error_of_every_rank_leaves_the_last_finished_step_saved(tmp_path, error, good):
    class Lost(Counting):
        def step(self) -> None:
            super().step()
            if self.count == 3:
                raise error("no group has a gradient")

    job = Lost(tmp_path, kept := Kept(), Signals(), good=good)
    with pytest.raises(error):
        job.run()
    assert kept.state == ({"count": 3} if good else None) and not job.finished
    assert kept.is_waited_for is not good, "a save under way would end with the process"
