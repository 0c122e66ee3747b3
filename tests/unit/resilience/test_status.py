"""Status files, and a run's state as a table, as JSON and as an exit code."""

import json
import pickle
from dataclasses import asdict, replace

import pytest

from megatron_tlt.cli.main import main
from megatron_tlt.resilience.heartbeat import Heartbeat, JobEnd, StatusFiles, write_status
from megatron_tlt.resilience.status import read_status, render

NOW = 1000.0
BEAT = Heartbeat("a", 0, 3, "n0", 10, 1, phase="rollout", step=4, order=9, running=3, queued=1, longest=70, left=99.6,
                 phase_seconds=12.0, silent_seconds=1.0, limit_seconds=40.0, state="BUSY", written_at=NOW)  # fmt: skip
KILLED = JobEnd("a", "killed", "rank 1 (host n1, pid 11) was killed", [1])


def write(run_dir, *changes, end=None):
    files = StatusFiles(run_dir)
    files.clear()
    for rank, more in enumerate(changes):
        beat = replace(BEAT, rank=rank, host=f"n{rank}", pid=10 + rank, **more)
        write_status(files.heartbeat(rank), beat)
    if end is not None:
        write_status(files.end, end)
    return files


def test_status_files_come_back_are_private_and_belong_to_one_start(tmp_path):
    (tmp_path / "status").mkdir(mode=0o777)
    files = write(tmp_path, {}, {"start_id": "b"})
    assert files.read_heartbeats("a") == ({0: replace(BEAT, host="n0")}, [])
    assert files.heartbeat(0).stat().st_mode & 0o777 == 0o600
    assert files.status.stat().st_mode & 0o777 == 0o700
    assert write_status(files.end, KILLED, only_first=True)
    assert not write_status(files.end, replace(KILLED, text="later"), only_first=True)
    assert files.read_end("a") == KILLED and files.read_end("b") is None
    assert len(list(files.status.iterdir())) == 3  # nothing temporary is left
    files.clear()
    assert list(files.status.iterdir()) == []


DAMAGED = [b"", b"{", b"[]", b"\xff\xfe", pickle.dumps(BEAT), b'{"rank": 1}', json.dumps(asdict(BEAT)).encode()[:-20]]


@pytest.mark.parametrize("data", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_and_missing_files_are_named_and_the_others_are_read(tmp_path, capsys, data):
    files = write(tmp_path, {}, {})
    files.heartbeat(1).write_bytes(data)
    files.end.write_bytes(data)
    assert main(["status", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "no status of rank 1, 2" in shown and "rank-00001.json: damaged" in shown


def test_a_directory_that_is_none_or_has_no_status(tmp_path, capsys):
    assert main(["status", str(tmp_path / "nowhere")]) == 2
    assert "must be the directory of a run" in capsys.readouterr().err
    assert main(["status", str(tmp_path)]) == 2
    assert "no status files" in capsys.readouterr().out
    write(tmp_path, {"step": -1})
    early = render(tmp_path, read_status(tmp_path))
    assert "before its first step; 1 of 3" in early and "-1" not in early


def test_a_running_job_with_the_worst_rank_first(tmp_path):
    idle = {"phase": "idle", "state": "TRAINING", "order": 10, "running": 0, "queued": 0}
    write(tmp_path, {}, {"process": "T"}, idle)
    status = read_status(tmp_path, NOW + 2)
    assert status.condition == "running"
    lines = render(tmp_path, status, now=NOW + 2).splitlines()
    assert lines[0] == f"{tmp_path}: running, step 4; 3 of 3 ranks on 3 hosts, last heartbeat 2.0 s ago"
    rows = [" ".join(line.split()) for line in lines[2:]]
    assert rows[0] == "rank host pid condition phase step for limit silent running queued longest left"
    assert rows[1] == "1 n1 11 stopped rollout (BUSY) 4 14.0 s 40.0 s 3.0 s 3 1 70 100"
    assert rows[2].startswith("0 n0 10 running")
    assert rows[3] == "2 n2 12 running idle (TRAINING) 4 14.0 s 40.0 s 3.0 s"
    write(tmp_path, *[{}] * 40)
    text = render(tmp_path, read_status(tmp_path, NOW), top=32, now=NOW)
    assert text.count("rollout (BUSY)") == 32 and text.endswith("and 8 more (--all)")


@pytest.mark.parametrize(
    ("outcomes", "end", "condition", "code"),
    [
        (["running"] * 3, None, "lost", 1),  # by the real clock there was no heartbeat for ages
        (["done"] * 3, None, "finished", 0),
        (["saved"] * 3, None, "saved", 0),
        (["done", "ended", "done"], None, "ended", 0),
        (["ended", "killed", "ended"], KILLED, "crashed", 1),
        (["ended", "killed", "ended"], None, "crashed", 1),
        (["ended"] * 3, replace(KILLED, outcome="hung"), "hung", 1),
        (["ended"] * 3, replace(KILLED, start_id="b"), "ended", 0),
    ],
)
def test_what_became_of_a_run(tmp_path, capsys, outcomes, end, condition, code):
    write(tmp_path, *[{"outcome": outcome, "detail": "as it ended"} for outcome in outcomes], end=end)
    assert main(["status", str(tmp_path)]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tmp_path}: {condition}, step 4;")
    if condition != "finished":
        assert lines[1] == (KILLED.text if end is not None and end.start_id == "a" else "as it ended")
    assert main(["status", str(tmp_path), "--json"]) == code
    shown = json.loads(capsys.readouterr().out)
    assert shown["condition"] == condition and len(shown["ranks"]) == 3
    assert {"silent_seconds", "host", "phase", "longest", "running", "condition"} <= shown["ranks"][0].keys()


def test_a_start_under_way_hides_the_one_before(tmp_path):
    write(tmp_path, {"outcome": "killed"}, {"start_id": "b", "written_at": NOW + 50}, {})
    status = read_status(tmp_path, NOW + 51)
    assert [beat.start_id for beat, _ in status.rows] == ["b"] and status.missing == [0, 2]
    assert status.condition == "running"
