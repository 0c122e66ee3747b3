"""Status files: whole or not there, private, and never believed blindly."""

import json
import pickle
from dataclasses import asdict, replace

import pytest

from megatron_tlt.resilience import status_files as files
from megatron_tlt.resilience.status_files import Ask, Beat, Verdict

BEAT = Beat("a", 3, 4, "n1", 42, 7, phase="rollout", step=2, longest=99, left=1.5)


@pytest.fixture
def run_dir(tmp_path):
    files.begin_attempt(tmp_path)
    return tmp_path


def test_a_beat_comes_back_and_is_private(run_dir):
    path = files.beat_path(run_dir, 3)
    assert files.write_json(path, BEAT)
    assert files.read_beat(path) == BEAT
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "alive",
        "rank-00003.json",
    ]  # nothing temporary is left


def test_rights_of_a_directory_that_was_open_to_others_are_taken_away(tmp_path):
    (tmp_path / "status").mkdir(mode=0o777)
    files.begin_attempt(tmp_path)
    assert (tmp_path / "status").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        pickle.dumps(BEAT),
        json.dumps(asdict(BEAT) | {"rank": "3"}).encode(),
        json.dumps(asdict(BEAT) | {"pid": True}).encode(),
        json.dumps(asdict(BEAT) | {"host": 5}).encode(),
        json.dumps({"rank": 3}).encode(),
        json.dumps(asdict(BEAT)).encode()[:-20],
    ],
    ids=range(10),
)
def test_a_file_that_is_no_beat_is_named_and_the_others_are_read(run_dir, data):
    files.write_json(files.beat_path(run_dir, 3), BEAT)
    bad = files.beat_path(run_dir, 1)
    bad.write_bytes(data)
    with pytest.raises(ValueError, match=r"rank-00001\.json"):
        files.read_beat(bad)
    beats, problems = files.read_beats(run_dir)
    assert beats == {3: BEAT}
    assert len(problems) == 1 and str(bad) in problems[0]


def test_a_later_version_may_say_more(run_dir):
    path = files.beat_path(run_dir, 3)
    path.write_text(json.dumps(asdict(BEAT) | {"colour": "blue"}))
    assert files.read_beat(path) == BEAT


def test_the_first_verdict_stands_and_belongs_to_its_attempt(run_dir):
    first = Verdict("a", "killed-1", "killed", 1, 5.0, "rank 1 died", [1])
    assert files.write_json(files.verdict_path(run_dir), first, unless_there=True)
    assert not files.write_json(files.verdict_path(run_dir), replace(first, by=2), unless_there=True)
    assert files.read_verdict(run_dir, "a") == first
    assert files.read_verdict(run_dir, "b") is None


def test_a_new_attempt_finds_nothing_of_the_last_but_its_verdict_aside(run_dir):
    files.write_json(files.beat_path(run_dir, 3), BEAT)
    files.write_json(files.verdict_path(run_dir), Verdict("a", "x", "hung", 0, 1.0, "why"))
    files.write_json(files.ask_path(run_dir), Ask("a", "ask-1"))
    assert files.read_ask(run_dir, "a") == Ask("a", "ask-1")
    files.begin_attempt(run_dir)
    assert sorted(p.name for p in files.status_dir(run_dir).iterdir()) == ["alive", "verdict-before.json"]
    assert files.read_verdict(run_dir, "a") is None and files.read_ask(run_dir, "a") is None


def test_beats_of_another_attempt_are_not_read(run_dir):
    for rank, attempt in enumerate("aab"):
        files.write_json(files.beat_path(run_dir, rank), replace(BEAT, rank=rank, attempt=attempt))
    assert sorted(files.read_beats(run_dir, "a")[0]) == [0, 1]
    assert sorted(files.read_beats(run_dir)[0]) == [0, 1, 2]
