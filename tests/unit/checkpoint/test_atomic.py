"""What a command made is replaced by a whole one or stays, and nothing else is ever replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_tlt.checkpoint.atomic import atomic_directory, problem_of
from megatron_tlt.config.checks.files import MADE_BY, MOUNTS, note_maker
from megatron_tlt.errors import CheckpointError

OLD, NEW = '{"architectures": ["Old"]}', '{"architectures": ["New"]}'


@pytest.fixture
def out(tmp_path):
    """What `it` made, alone in its directory."""
    directory = tmp_path / "place" / "out"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(OLD)
    note_maker(directory, "it")
    return directory


def replace(out):
    with atomic_directory(out, "it", overwrite=True) as scratch:
        (scratch / "config.json").write_text(NEW)


def content(directory):
    """Of all files below, by name, but for the maker's."""
    files = [p for p in directory.rglob("*") if p.is_file() and p.name != MADE_BY]
    return {str(p.relative_to(directory)): p.read_text() for p in files}


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
    made = (out / MADE_BY).read_text()
    with pytest.raises(CheckpointError, match="no directory that `it` made"), atomic_directory(out, "it", True):
        (out / MADE_BY).rename(out / "notes.txt")
    assert content(out.parent) == {"out/config.json": OLD, "out/notes.txt": made}


def test_the_working_directory_can_be_replaced(out, monkeypatch):
    monkeypatch.chdir(out)
    replace(Path())
    assert content(out.parent) == {"out/config.json": NEW} and os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize("maker", ["null", "3", "[]", "{}", "{", '"it"', '{"command": "sft"}', '{"command": 1}'])
def test_only_what_the_same_command_made_is_replaced(out, maker):
    (out / MADE_BY).write_text(maker)
    assert "no directory that `it` made" in str(problem_of(out, "it", overwrite=True))


def test_in_a_container_only_its_mounts_are_written_to(out, monkeypatch):
    monkeypatch.setenv(MOUNTS, str(out.parent))
    assert problem_of(out, "it", overwrite=True) is None
    monkeypatch.setenv(MOUNTS, str(out / "in"))
    assert f"{out} lies in the container" in str(problem_of(out, "it", overwrite=True))


def test_an_empty_directory_is_nothing(tmp_path):
    assert problem_of(tmp_path, "it") is None
    with atomic_directory(tmp_path / "new", "it") as scratch:
        (tmp_path / "new").mkdir()
        (scratch / "a").write_text("b")
    assert content(tmp_path) == {"new/a": "b"}


def test_a_directory_without_a_name_is_not_replaced(out):
    assert problem_of(out, "it", overwrite=True) is None
    for nameless in (out / "..", Path("/")):
        assert "name the directory itself" in str(problem_of(nameless, "it", overwrite=True))
