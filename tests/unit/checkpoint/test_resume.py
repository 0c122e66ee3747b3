"""Which checkpoint a start loads, and its messages about those that it refuses."""

import errno
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_tlt.actor import checkpoint_files as files
from megatron_tlt.actor.base_fingerprint import base_fingerprint
from megatron_tlt.checkpoint import resume
from megatron_tlt.checkpoint.manager import CheckpointManager
from megatron_tlt.config.load import build_config, load_config
from megatron_tlt.config.run import CheckpointSection
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.drafters.checkpoint import drafter_entries
from megatron_tlt.drafters.eagle.config import Eagle3Config
from megatron_tlt.drafters.state_file import DRAFTER_STATE, drafter_state_writer
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.hf.writer import save_hf
from megatron_tlt.observe.metrics import METRICS_FILE
from megatron_tlt.trainer.loop import RLTrainer
from tests.helpers.tiny_drafters import DEEP
from tests.helpers.tiny_models import TINY, random_weights
from tests.unit.actor.test_checkpoint_files import published

WORLD = SingleProcess()


DAMAGE = {
    "is damaged: shard was altered": lambda directory: (directory / "shard").write_bytes(b"Weights of step 0"),
    "is damaged: shard is torn": lambda directory: (directory / "shard").write_bytes(b"weight"),
    "is damaged: shard is missing": lambda directory: (directory / "shard").unlink(),
    "never completed": lambda directory: (directory / files.MANIFEST).unlink(),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_or_refused_by_name(tmp_path, message, caplog):
    good, last = (published(tmp_path, step) for step in (2, 3))
    assert resume.find_checkpoint(WORLD, tmp_path, "auto") == last
    DAMAGE[message](last)
    assert resume.find_checkpoint(WORLD, tmp_path, "auto") == good
    assert f"REFUSED: checkpoint {last}" in caplog.text
    with pytest.raises(CheckpointError, match=rf"step-000003.*{message}.*; use .*step-000002, which is whole"):
        resume.find_checkpoint(WORLD, tmp_path, str(last))
    DAMAGE[message](good)
    if message != "never completed":  # one without a manifest is no checkpoint
        with pytest.raises(CheckpointError, match="every checkpoint in"):
            resume.find_checkpoint(WORLD, tmp_path, "auto")
    assert resume.find_checkpoint(WORLD, tmp_path, "never") is None
    assert resume.find_checkpoint(WORLD, tmp_path / "empty", "auto") is None


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_checkpoint_whose_file_stays_unreadable_is_passed_over(tmp_path, monkeypatch, number):
    good, last = (published(tmp_path, step) for step in (2, 3))
    record_of = files.record_of

    def record(file):
        if file.parent == last:
            raise OSError(number, os.strerror(number), str(file))
        return record_of(file)

    monkeypatch.setattr(files, "record_of", record)
    if number == errno.ESTALE:  # it may pass: no step is done again for it
        with pytest.raises(OSError, match="Stale"):
            resume.find_checkpoint(WORLD, tmp_path, "auto")
        return
    assert resume.find_checkpoint(WORLD, tmp_path, "auto") == good
    with pytest.raises(CheckpointError, match=r"step-000003 cannot be read: .*; use .*step-000002, which is whole"):
        resume.find_checkpoint(WORLD, tmp_path, str(last))


@pytest.mark.parametrize("content", [b"10\n", b"\n", b"step-\xff"])
def test_a_garbled_pointer_is_none(tmp_path, content, caplog):
    _, last = (published(tmp_path, step) for step in (2, 3))
    (tmp_path / files.LATEST).write_bytes(content)
    assert resume.find_checkpoint(WORLD, tmp_path, "auto") == last
    assert "latest names no checkpoint" in caplog.text


def test_a_checkpoint_is_put_back_whose_step_was_killed_while_it_was_saved_again(tmp_path, monkeypatch):
    checkpoints = tmp_path / "checkpoints"
    directory, rename = published(checkpoints, 3, keep=1), os.rename

    def killed(source, target):
        if target == directory:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        published(checkpoints, 3, keep=1)
    monkeypatch.undo()
    assert not directory.exists()
    loaded = SimpleNamespace(load=lambda path: {"from": path})
    start = CheckpointManager(CheckpointSection(), tmp_path, 9, loaded, WORLD, lock=SimpleNamespace())
    assert start.load_latest()["from"] == directory and start.newest == 3


@pytest.mark.parametrize(
    ("given", "removed"), [("auto", None), ("never", "2, 4, 6"), ("step-000002", "4, 6"), ("step-000006", None)]
)
def test_checkpoints_that_a_start_from_an_earlier_step_removes_are_named_before(tmp_path, given, removed):
    for step in (2, 4, 6):
        published(tmp_path / "checkpoints", step)
    resumed = f"{tmp_path / 'checkpoints' / given}" if given.startswith("step") else given
    options = [f"train.run_dir={tmp_path}", f"checkpoint.resume={resumed}"]
    warning = resume.removal_warning(load_config("configs/quickstart.yaml", options))
    ended = load_config("configs/quickstart.yaml", [*options, "train.num_steps=2"])
    assert resume.removal_warning(ended) == (warning if given == "never" else None)
    assert (warning is None) == (removed is None)
    assert removed is None or ", ".join(f"step-00000{step}" for step in removed.split(", ")) in warning


def test_a_start_behind_one_that_was_killed_before_its_first_save_names_what_it_removes(tmp_path):
    for step in (2, 4):
        published(tmp_path / "checkpoints", step)
    config = load_config("configs/quickstart.yaml", [f"train.run_dir={tmp_path}"])
    assert resume.removal_warning(config) is None
    files.write_latest(tmp_path / "checkpoints", "step-000000")
    assert "auto goes on after step 0: " in resume.removal_warning(config)
    assert "step-000002, step-000004" in resume.removal_warning(config)


@pytest.mark.parametrize(("first", "fits"), [(1, False), (3, True), (None, True)])
@pytest.mark.parametrize("place", ["run", "other"])
def test_another_runs_checkpoint_does_not_go_on_behind_the_rows_of_a_run(tmp_path, first, fits, place):
    """The row of its own step is of an evaluation by an earlier start of the same branch."""
    directory, run_dir = published(tmp_path / place / "checkpoints", 3), tmp_path / "run"
    if first is not None:
        run_dir.mkdir(exist_ok=True)
        (run_dir / METRICS_FILE).write_text(f'{{"step":{first}}}\n{{"step":4}}\n')
    config = load_config("configs/quickstart.yaml", [f"train.run_dir={run_dir}", f"checkpoint.resume={directory}"])
    problems = resume.resume_problems(config, None, "cpu")
    assert len(problems) == (not fits and place == "other")
    for problem in problems:
        assert problem.path == "checkpoint.resume" and problem.value == str(directory)
        assert f"must be in {run_dir / 'checkpoints'}, or train.run_dir another" in problem.allowed


@pytest.mark.parametrize(("every", "steps"), [(0, [5]), (2, [2, 4, 5]), (9, [5])])
def test_a_checkpoint_is_scheduled_behind_the_last_step_whatever_the_interval(tmp_path, every, steps):
    manager = CheckpointManager(CheckpointSection(every=every), tmp_path, 5, SimpleNamespace(), WORLD)
    assert [step for step in range(1, 6) if manager.is_scheduled(step)] == steps


def test_a_named_checkpoint_that_cannot_be_used_is_a_problem_of_its_field(tmp_path):
    directory = published(tmp_path, 3)
    assert resume.checkpoint_problems(str(directory)) == resume.checkpoint_problems("auto") == []
    (directory / "shard").write_bytes(b"weigh")
    words = {
        directory: "is damaged: shard is torn",
        tmp_path / "step-000004": "does not exist",
        tmp_path: "step-NNNNNN",
    }
    for path, word in words.items():
        (problem,) = resume.checkpoint_problems(str(path))
        assert problem.path == "checkpoint.resume" and word in problem.allowed


def test_adapters_go_on_with_their_base_and_not_with_an_export_of_theirs(tmp_path):
    """A base whose weights are elsewhere is not compared."""
    tree = {"data": {"train": {"tasks": [{"name": "chain_sum"}]}}, "actor": {"lora": {"rank": 2}}}
    merged = ((name, w + 0.1 if "o_proj" in name else w) for name, w in random_weights(TINY))
    save_hf(tmp_path / "base", TINY, random_weights(TINY))
    save_hf(tmp_path / "merged", TINY, merged)
    base, other = (
        build_config(tree, [f"model.path={tmp_path / name}", f"train.run_dir={tmp_path}"])
        for name in ("base", "merged")
    )
    directory = published(tmp_path / "checkpoints", 1)
    record = files.training_record(base.actor, base.optimizer.name, False, base_fingerprint(base.model, TINY))
    found = replace(files.read_manifest(directory), model=files.model_record(TINY), training=record)
    (directory / files.MANIFEST).write_text(found.to_json())
    assert not resume.resume_problems(base, TINY, "cpu")
    (problem,) = resume.resume_problems(other, TINY, "cpu")
    assert "the checkpoint of step 1 does not fit this run: base is" in problem.allowed
    (tmp_path / "base/model.safetensors").unlink()
    assert not resume.resume_problems(base, TINY, "cpu")


@pytest.mark.parametrize(("layers", "fits"), [("[0,2,6]", True), ("[0,3,6]", False)])
def test_a_checkpoint_with_another_drafter_is_refused_before_anything_is_loaded(tmp_path, layers, fits):
    chosen = {"drafter": "eagle3", "drafter_path": "null", "layers": layers}
    given = [f"rollout.speculation.{name}={value}" for name, value in chosen.items()]
    config = load_config("configs/quickstart.yaml", [*given, f"train.run_dir={tmp_path}"])
    shape, shards = DEEP["llama"], config.actor.shards_optimizer(config.optimizer, cuda=False)
    records = files.model_record(shape), files.training_record(config.actor, config.optimizer.name, shards, "")
    directory = published(tmp_path / "checkpoints", 3, records=records)
    about = drafter_entries(Eagle3Config.of(shape, (0, 2, 6)))
    drafter_state_writer({"about": about})(directory / DRAFTER_STATE)
    problems = resume.resume_problems(config, shape, "cpu")
    assert len(problems) == (not fits)
    assert fits or "eagle3_layers is [0, 2, 6], not [0, 3, 6]" in problems[0].allowed


@pytest.mark.parametrize(
    ("given", "fits", "rates"),
    [
        ([], True, None),
        (["train.num_steps=900"], True, None),
        (["optimizer.schedule=cosine"], True, None),
        (["optimizer.schedule=linear", "train.num_steps=10"], True, "from 9e-05 to 7e-05"),
        (["optimizer.schedule=linear", "train.num_steps=3"], True, "from 9e-05 to 0"),
        (["algorithm.mini_batches=1"], True, None),
        (["optimizer.schedule=cosine", "algorithm.mini_batches=1"], False, None),
        (["optimizer.schedule=linear", "algorithm.mini_batches=8"], False, None),
    ],
)
def test_a_decaying_rate_needs_the_checkpoints_updates_a_step_and_jumps_with_their_number(tmp_path, given, fits, rates):
    """Its schedule's position is a count of updates, its length follows from the number of those a step."""
    files_of = [f"train.run_dir={tmp_path}", "rollout.speculation.drafter_path=null", "train.num_steps=30"]
    files_of += ["optimizer.lr=1e-4", "optimizer.warmup_steps=0"]
    before, config = (
        load_config("configs/quickstart.yaml", [*files_of, "algorithm.mini_batches=4", *more]) for more in ([], given)
    )
    shards = before.actor.shards_optimizer(before.optimizer, cuda=False)
    records = files.model_record(TINY), files.training_record(before.actor, before.optimizer.name, shards, "")
    directory = published(tmp_path / "checkpoints", 3, records=records)
    state = RLTrainer.state_dict(SimpleNamespace(recovery=SimpleNamespace(state_dict=dict), config=before))
    found = replace(files.read_manifest(directory), extra=state, optimizer_steps=12)
    (directory / files.MANIFEST).write_text(found.to_json())
    problems = resume.resume_problems(config, TINY, "cpu")
    assert len(problems) == (not fits)
    now = config.algorithm.mini_batches
    assert fits or f"algorithm.mini_batches is 4, not {now}, and" in problems[0].allowed
    warning = resume.schedule_warning(config)
    assert not fits or (warning is None) == (rates is None)
    assert rates is None or f"at step 3 the learning rate goes {rates}" in warning
