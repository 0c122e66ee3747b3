"""A model is replaced by a whole one or stays, and nothing else is ever replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_tlt.checkpoint.atomic import atomic_directory, problem_of
from megatron_tlt.errors import CheckpointError

OLD, NEW = '{"architectures": ["Old"]}', '{"architectures": ["New"]}'


@pytest.fixture
def out(tmp_path):
    """A model, alone in its directory."""
    directory = tmp_path / "place" / "out"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(OLD)
    return directory


def replace(out):
    with atomic_directory(out, overwrite=True) as scratch:
        (scratch / "config.json").write_text(NEW)


def content(directory):
    """Of all files below, by name."""
    return {str(p.relative_to(directory)): p.read_text() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("failing", [1, 2])
def test_a_model_is_put_back_if_it_cannot_be_replaced(out, monkeypatch, error, failing):
    true, calls = os.rename, []

    def rename(source, target):
        calls.append(target)
        if len(calls) == failing:
            raise error
        true(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(error):
        replace(out)
    assert content(out.parent) == {"out/config.json": OLD} and os.listdir(out.parent) == ["out"]


def test_what_appears_meanwhile_is_left(out):
    with pytest.raises(CheckpointError, match="no directory with the config"), atomic_directory(out, True):
        (out / "config.json").rename(out / "notes.txt")
    assert content(out.parent) == {"out/notes.txt": OLD}


def test_the_working_directory_can_be_replaced(out, monkeypatch):
    monkeypatch.chdir(out)
    replace(Path())
    assert content(out.parent) == {"out/config.json": NEW} and os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize("config", ["null", "3", "[]", "{}", "{", '"architectures"'])
def test_only_a_model_is_replaced(out, config):
    (out / "config.json").write_text(config)
    assert "no directory with the config.json of a model" in str(problem_of(out, overwrite=True))


def test_a_directory_without_a_name_is_not_replaced(out):
    assert problem_of(out, overwrite=True) is None
    for nameless in (out / "..", Path("/")):
        assert "name the directory itself" in str(problem_of(nameless, overwrite=True))
