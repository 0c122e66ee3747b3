"""A run's state as a table, as JSON and as an exit status."""

import json
from dataclasses import replace

import pytest

from megatron_tlt.cli import status as cli_status
from megatron_tlt.cli.main import main
from megatron_tlt.resilience import status_files as files
from megatron_tlt.resilience import status_table as table
from megatron_tlt.resilience.status_files import Beat, Verdict

NOW = 1000.0
BEAT = Beat("a", 0, 3, "n0", 10, 1, phase="rollout", step=4, order=9, running=3, queued=1, longest=70, left=99.6,
            phase_seconds=12.0, silent_seconds=1.0, limit_seconds=40.0, state="BUSY", written_at=NOW)  # fmt: skip


def write(run_dir, *beats, verdict=None):
    files.begin_attempt(run_dir)
    for beat in beats:
        files.write_json(files.beat_path(run_dir, beat.rank), beat)
    if verdict is not None:
        files.write_json(files.verdict_path(run_dir), verdict)
    return run_dir


def beats(*changes):
    return [
        replace(BEAT, rank=rank, host=f"n{rank}", pid=10 + rank, **more) for rank, more in enumerate(changes)
    ]


def test_a_running_job_with_the_worst_rank_first(tmp_path):
    idle = {"phase": "idle", "state": "TRAINING", "order": 10, "running": 0, "queued": 0}
    write(tmp_path, *beats({}, {"process": "T"}, idle))
    status = table.read_status(tmp_path, NOW + 2)
    assert status.condition == "running"
    lines = table.render(tmp_path, status, now=NOW + 2).splitlines()
    assert lines[0] == f"{tmp_path}: running, step 4; 3 of 3 ranks on 3 hosts, last heard of 2.0 s ago"
    rows = [" ".join(line.split()) for line in lines[2:]]
    assert rows[0] == "rank host pid condition phase step for limit silent running queued longest left"
    assert rows[1] == "1 n1 11 stopped rollout (BUSY) 4 14.0 s 40.0 s 3.0 s 3 1 70 100"
    assert rows[2].startswith("0 n0 10 running")
    assert rows[3] == "2 n2 12 running idle (TRAINING) 4 14.0 s 40.0 s 3.0 s"


def test_few_of_many_rows(tmp_path):
    write(tmp_path, *beats(*[{}] * 40))
    text = table.render(tmp_path, table.read_status(tmp_path, NOW), top=32, now=NOW)
    assert text.count("rollout (BUSY)") == 32 and text.endswith("and 8 more (--all)")


KILLED = Verdict("a", "killed-1", "killed", 1, NOW, "rank 1 (host n1, pid 11) was killed", [1])


@pytest.mark.parametrize(
    ("changes", "verdict", "condition", "code"),
    [
        ([{}, {}, {}], None, "lost", 1),  # by the real clock nobody has written for ages
        ([{"outcome": "done"}] * 3, None, "finished", 0),
        ([{"outcome": "saved"}] * 3, None, "saved", 0),
        ([{"outcome": "done"}, {"outcome": "ended"}, {"outcome": "done"}], None, "ended", 0),
        ([{"outcome": "ended"}, {"outcome": "killed"}, {"outcome": "ended"}], KILLED, "crashed", 1),
        ([{"outcome": "ended"}, {"outcome": "killed"}, {"outcome": "ended"}], None, "crashed", 1),
        ([{"outcome": "ended"}] * 3, replace(KILLED, kind="hung"), "hung", 1),
        ([{"outcome": "ended"}] * 3, replace(KILLED, attempt="b"), "ended", 0),
    ],
)
def test_what_became_of_a_run(tmp_path, capsys, changes, verdict, condition, code):
    write(tmp_path, *beats(*changes), verdict=verdict)
    assert main(["status", str(tmp_path)]) == code
    shown = capsys.readouterr().out
    assert f": {condition}, step 4;" in shown
    assert (verdict is not None and verdict.attempt == "a") == (KILLED.text in shown)
    assert main(["status", str(tmp_path), "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["condition"] == condition and len(told["ranks"]) == 3
    assert {"silent_seconds", "host", "phase", "longest", "running", "condition"} <= told["ranks"][0].keys()


@pytest.mark.parametrize("outcome", ["saved", "ended"])
def test_a_run_that_a_signal_ended_says_how_far_it_is(tmp_path, outcome):
    detail = "ended by a signal after step 4 of 30; saved, the same command goes on"
    write(tmp_path, *beats(*[{"outcome": outcome, "detail": detail}] * 3))
    lines = table.render(tmp_path, table.read_status(tmp_path, NOW), now=NOW).splitlines()
    assert lines[0].startswith(f"{tmp_path}: {outcome}, step 4;") and lines[1:3] == [detail, ""]


def test_damaged_and_missing_files_are_said(tmp_path, capsys):
    write(tmp_path, *beats({}, {}))
    files.beat_path(tmp_path, 1).write_text("{")
    assert main(["status", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "no status of rank 1, 2" in shown and "rank-00001.json: not JSON" in shown
    assert main(["status", str(tmp_path / "nowhere")]) == 2
    assert "must be the directory of a run" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["status", str(tmp_path / "empty")]) == 2
    assert "no status files" in capsys.readouterr().out


def test_a_start_under_way_hides_the_attempt_before(tmp_path):
    write(tmp_path, *beats({"outcome": "killed"}, {}, {}))
    new = replace(BEAT, attempt="b", rank=1, written_at=NOW + 50)
    files.write_json(files.beat_path(tmp_path, 1), new)
    status = table.read_status(tmp_path, NOW + 51)
    assert [beat.attempt for beat, _ in status.rows] == ["b"] and status.missing == [0, 2]
    assert status.condition == "running"


def test_nobody_runs_who_could_be_asked_for_stacks(tmp_path):
    write(tmp_path, *beats({"outcome": "done"}))
    assert "nobody to ask" in cli_status.ask_for_stacks(tmp_path)
    assert not files.ask_path(tmp_path).exists()


def test_who_does_not_answer_is_named(tmp_path):
    write(tmp_path, *beats({"heartbeat_s": 0.1}, {"heartbeat_s": 0.1}))
    said = cli_status.ask_for_stacks(tmp_path, patience_s=0.2)
    assert "stacks of 0 of 2 running ranks" in said and said.endswith("none came from rank 0, 1")
    assert files.read_ask(tmp_path, "a") is not None
