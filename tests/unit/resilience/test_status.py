"""Status files, and a run's state as a table, as JSON and as an exit code."""

import errno
import json
import os
import pickle
from dataclasses import asdict, replace

import pytest

from megatron_tlt.cli.main import main
from megatron_tlt.resilience.status import read_status, status_text
from megatron_tlt.resilience.status_files import JobEnd, RankStatus, StatusFiles
from tests.helpers.synthetic_run import write_run

NOW = 1000.0
RANK = RankStatus("a", 0, 3, "n0", 10, phase="rollout", step=4, running=3, queued=1, longest=70, left=99.6,
                  phase_at=NOW - 12, written_at=NOW - 1, limit_seconds=40.0, state="BUSY")  # fmt: skip
KILLED = JobEnd("a", "killed", "rank 1 (host n1, pid 11) was killed", [1], NOW)


def write(run_dir, *changes, end=None):
    """The files of ranks on hosts of their own, whose watchdogs wrote at `NOW`."""
    files = StatusFiles(run_dir)
    files.clear()
    for rank, more in enumerate(changes):
        files.write_rank(replace(RANK, rank=rank, host=f"n{rank}", pid=10 + rank, first=rank, **more))
        files.host(rank).touch()
        os.utime(files.host(rank), (NOW, NOW))
    if end is not None:
        assert files.claim_end(end)
    return files


def test_status_files_come_back_are_private_and_belong_to_one_start(tmp_path):
    (tmp_path / "status").mkdir(mode=0o777)
    files = write(tmp_path, {"detail": "long " * 1000}, {})
    files.write_rank(RANK)  # shorter: nothing of the longer one is left
    assert files.read_ranks() == ({0: RANK, 1: replace(RANK, rank=1, host="n1", pid=11, first=1)}, [])
    assert files.rank(0).stat().st_mode & 0o777 == 0o600
    assert files.status.stat().st_mode & 0o777 == 0o700
    assert files.claim_end(KILLED)
    assert not files.claim_end(replace(KILLED, text="later"))
    assert files.read_end("a") == KILLED and files.read_end("b") is None
    assert len(list(files.status.iterdir())) == 5  # nothing temporary is left
    files.clear()
    assert list(files.status.iterdir()) == []


def test_a_report_says_why_its_run_ended(tmp_path, capsys):
    run = write_run(tmp_path / "run", ranks=2, steps=3, num_steps=5)
    write(run, {}, {}, end=KILLED)
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert KILLED.text in capsys.readouterr().err
    page = (tmp_path / "page.html").read_text()
    assert "crashed, 3 of 5 steps" in page and KILLED.text in page


DAMAGED = [b"", b"{", b"[]", b"\xff\xfe", pickle.dumps(RANK), b'{"rank": 1}', json.dumps(asdict(RANK)).encode()[:-20]]


@pytest.mark.parametrize("data", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_and_missing_files_are_named_and_the_others_are_read(tmp_path, capsys, data):
    files = write(tmp_path, {}, {})
    files.rank(1).write_bytes(data)
    (files.status / "end-a.json").write_bytes(data)
    assert main(["status", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "no status of rank 1, 2" in shown and "rank-00001.json: damaged" in shown


def test_a_directory_without_status_and_one_before_its_first_step(tmp_path, capsys):
    assert main(["status", str(tmp_path)]) == 2
    assert capsys.readouterr().out.endswith("no status files\n")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished/config.json").write_text('{"sft": {}}')
    assert main(["status", str(tmp_path)]) == 2
    assert "no status files: `sft` made it" in capsys.readouterr().out
    write(tmp_path, {"step": -1})
    shown = status_text("RUN", read_status(tmp_path))  # no path that could have the number in it
    assert "before its first step; 1 of 3" in shown and "-1" not in shown


def test_a_run_that_one_may_not_read_is_not_taken_for_an_empty_one(tmp_path, capsys, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    write(tmp_path, {})
    monkeypatch.setattr(os, "listdir", refuse)  # root may read all
    assert main(["status", str(tmp_path)]) == 2
    assert f"must be a run that you may read: {tmp_path}/status: Permission denied" in capsys.readouterr().err


def test_a_running_job_with_the_worst_rank_first(tmp_path):
    idle = {"phase": "idle", "state": "TRAINING", "phase_at": NOW - 500, "running": 0, "queued": 0}
    idle["written_at"] = NOW - 400  # but its watchdog lives
    write(tmp_path, {}, {"phase_at": NOW - 39}, idle)
    status = read_status(tmp_path, NOW + 2)
    assert status.condition == "running"
    lines = status_text("RUN", status, now=NOW + 2).splitlines()
    assert lines[0] == "RUN: running, step 4; 3 of 3 ranks on 3 hosts, last sign of life 3.0 s ago"
    rows = [" ".join(line.split()) for line in lines[2:]]
    assert rows[0] == "rank host pid condition phase step for limit silent running queued longest left"
    assert rows[1] == "1 n1 11 slow rollout (BUSY) 4 41.0 s 40.0 s 3.0 s 3 1 70 100"
    assert rows[3] == "0 n0 10 running rollout (BUSY) 4 14.0 s 40.0 s 3.0 s 3 1 70 100"
    assert rows[2] == "2 n2 12 running idle (TRAINING) 4 502 s 40.0 s 402 s", "it only waits"
    write(tmp_path, *[{}] * 40)
    text = status_text("RUN", read_status(tmp_path, NOW), top=32, now=NOW)
    assert text.count("rollout (BUSY)") == 32 and text.endswith("and 8 more (--all)")


def test_the_worst_of_all_conditions_comes_first(tmp_path):
    alive = {"written_at": NOW + 90, "phase_at": NOW + 80}
    changes = [
        *({}, {"outcome": "done"}, {**alive, "phase_at": 0.0}, alive, {"outcome": "saved"}, {"outcome": "ended"}),
        *({"outcome": "failed"}, {"written_at": NOW - 5}),
    ]
    write(tmp_path, *changes)
    rows = read_status(tmp_path, NOW + 100).rows
    conditions = ["failed", "lost", "lost", "slow", "running", "ended", "saved", "done"]
    assert [row.condition for row in rows] == conditions
    assert [row.status.rank for row in rows] == [6, 7, 0, 2, 3, 5, 4, 1], "of two the longer silent one"
    assert StatusFiles(tmp_path).claim_end(replace(KILLED, at=NOW + 5, ranks=[2]))
    rows = read_status(tmp_path, NOW + 100).rows
    assert [row.condition for row in rows] == ["killed", "failed", *["ended"] * 4, "saved", "done"]
    silent = {row.status.rank: row.silent_seconds for row in rows}
    assert (silent[0], silent[7], silent[5]) == (6.0, 10.0, 0.0), "when the job ended"


@pytest.mark.parametrize(
    ("outcomes", "end", "condition", "code"),
    [
        (["running"] * 3, None, "lost", 1),  # by the real clock there was no heartbeat for ages
        (["done"] * 3, None, "finished", 0),
        (["saved"] * 3, None, "saved", 0),
        (["done", "ended", "done"], None, "ended", 0),
        (["running"] * 3, KILLED, "crashed", 1),
        (["ended", "failed", "ended"], None, "crashed", 1),
        (["running"] * 3, replace(KILLED, outcome="hung"), "hung", 1),
        (["ended"] * 3, replace(KILLED, start="b"), "ended", 0),
    ],
)
def test_what_became_of_a_run(tmp_path, capsys, outcomes, end, condition, code):
    write(tmp_path, *[{"outcome": outcome, "detail": "as it ended"} for outcome in outcomes], end=end)
    assert main(["status", str(tmp_path)]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tmp_path}: {condition}, step 4;")
    if condition != "finished":
        assert lines[1] == (KILLED.text if end is not None and end.start == "a" else "as it ended")
    assert main(["status", str(tmp_path), "--json"]) == code
    shown = json.loads(capsys.readouterr().out)
    assert shown["condition"] == condition and len(shown["ranks"]) == 3
    assert {"silent_seconds", "host", "phase", "longest", "running", "condition"} <= shown["ranks"][0].keys()


def test_a_start_under_way_hides_the_one_before(tmp_path):
    write(tmp_path, {"outcome": "failed"}, {"start": "b", "written_at": NOW + 50}, {})
    status = read_status(tmp_path, NOW + 51)
    assert [row.status.start for row in status.rows] == ["b"] and status.missing == [0, 2]
    assert status.condition == "running"
