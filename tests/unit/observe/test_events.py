import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from megatron_tlt.observe.events import EventLog, events_path, step_of
from megatron_tlt.observe.jsonl import to_line
from tests.helpers.events import read_events


def test_spans_and_instants_are_on_disk_after_the_step(tmp_path):
    log = EventLog(tmp_path, rank=3)
    assert read_events(tmp_path, 3) == [], "lines are buffered"
    with log.span("rollout", 7):
        time.sleep(0.01)
    log.instant("weight_sync", 7, version=8)
    totals = log.end_step()
    opened, span, instant = read_events(tmp_path, 3)
    assert opened["name"] == "open"
    assert (span["kind"], span["name"], span["step"], span["rank"]) == ("span", "rollout", 7, 3)
    assert 0.01 <= span["dur"] < 5
    assert abs(span["ts"] - time.time()) < 60
    assert (instant["kind"], instant["attrs"]) == ("instant", {"version": 8})
    assert totals["rollout"] == pytest.approx(span["dur"], abs=1e-5)
    log.close()


def test_an_error_is_noted_and_written_at_once(tmp_path):
    log = EventLog(tmp_path, 0)
    with pytest.raises(KeyError), log.span("score", 1):
        raise KeyError("x")
    assert read_events(tmp_path, 0)[-1]["attrs"] == {"error": "KeyError"}
    log.close()


def test_the_buffer_is_written_at_exit(tmp_path):
    code = "import sys\nfrom megatron_tlt.observe.events import EventLog\nEventLog(sys.argv[1], 0).instant('last', 1)\n"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert read_events(tmp_path, 0)[-1]["name"] == "last"


def test_a_torn_line_is_left_out_and_the_next_one_stands_alone(tmp_path):
    path = events_path(tmp_path, 0)
    path.parent.mkdir()
    path.write_text('{"ts":1,"name":"whole"}\n{"ts":2,"na')
    with closing(EventLog(tmp_path, 0)) as log:
        log.instant("after", 1)
    assert [e["name"] for e in read_events(tmp_path, 0)] == ["whole", "open", "after"]


def test_the_step_of_a_line_is_known_without_parsing_it(tmp_path):
    with closing(EventLog(tmp_path, 12)) as log:
        log.state("BUSY", 3, 1.8e9, 0.5)
        log.instant("curve", 40, running=4)
    lines = events_path(tmp_path, 12).read_bytes().splitlines(keepends=True)
    assert [step_of(line) for line in lines] == [None, 3, 40]
    assert [step_of(lines[2][:end] + b"\n") for end in (60, -3, -2)] == [None] * 3, "torn"


def test_rows_take_what_json_lacks():
    row = {"nan": float("nan"), "inf": [float("inf"), 1.5], "path": Path("a"), "tuple": (1, None)}
    assert to_line(row) == '{"nan":null,"inf":[null,1.5],"path":"a","tuple":[1,null]}\n'
