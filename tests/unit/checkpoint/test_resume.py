"""Which checkpoint a start loads, and its messages about those that it refuses."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_tlt.actor import checkpoint_files as files
from megatron_tlt.checkpoint import resume
from megatron_tlt.errors import CheckpointError

WORLD = SimpleNamespace(is_main=True, broadcast_object=lambda value: value)


def test_a_refusal_names_the_checkpoint_before_it(monkeypatch, caplog):
    monkeypatch.setattr(resume, "_candidates", lambda _: [Path("step-2"), Path("step-1")])
    monkeypatch.setattr(resume, "_problem", lambda _, path: f"{path} is damaged")
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(CheckpointError, match=r"; checkpoint\.resume=never starts anew"),
    ):
        resume.find_checkpoint(WORLD, Path("run"), "auto")
    assert [record.getMessage() for record in caplog.records] == [
        "REFUSED: step-2 is damaged. Falling back to the checkpoint before it.",
        "REFUSED: step-1 is damaged. There is none before it.",
    ]


def test_a_named_checkpoint_that_cannot_be_used_is_a_problem_of_its_field(tmp_path):
    directory = tmp_path / "step-000003"
    scratch = files.scratch_of(directory)
    scratch.mkdir()
    (scratch / "shard").write_bytes(b"weights")
    files.publish(directory, files.Manifest(3, 1, 1, {}, {}, {}, {}), None)
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
