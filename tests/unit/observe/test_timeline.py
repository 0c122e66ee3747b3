"""The trace: by the rules of the Trace Event Format, and with everything that the events say."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict

import pytest

from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.events import EventLog, events_path, read_events
from megatron_tlt.observe.timeline import nested, write_timeline
from tests.helpers.synthetic_run import write_run

METADATA = {"process_name", "process_sort_index", "thread_name"}


def check(trace: dict) -> None:
    """The rules for the kinds of event that are used: required fields, types, and nesting on every thread."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    stacks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["ph"] in "MXCi" and isinstance(event["name"], str) and isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] in METADATA and event["args"]
            continue
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(v, int | float) for v in event["args"].values())
            continue
        assert isinstance(event["tid"], int)
        if event["ph"] == "i":
            assert event["s"] in "gpt"
        else:
            assert event["dur"] >= 0
            stacks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in stacks.values():
        open_ends: list[int] = []
        for start, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], "slices of one thread nest or follow each other"
            open_ends.append(end)


def read(path) -> dict:
    return json.loads(gzip.decompress(path.read_bytes()))


def test_a_trace_follows_the_rules_and_loses_nothing(tmp_path):
    folder = write_run(tmp_path / "r", ranks=3, steps=4)
    count = write_timeline(folder, tmp_path / "t.json.gz")
    trace = read(tmp_path / "t.json.gz")
    check(trace)
    assert count == len(trace["traceEvents"])
    for rank in range(3):
        spans = [e for e in read_events(folder, rank) if e["kind"] in ("span", "state")]
        slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == rank]
        assert len(slices) == len(spans)
        assert sum(e["dur"] for e in slices) == pytest.approx(1e6 * sum(e["dur"] for e in spans), abs=100)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 2", "run r"}
    counters = {e["name"] for e in trace["traceEvents"] if e["ph"] == "C"}
    assert counters == {
        "running requests",
        "steps that draft",
        "reward/mean",
        "spec/accept_length",
        "steps by strategy",
    }
    assert min(e["ts"] for e in trace["traceEvents"] if "ts" in e) == 0


def test_real_event_logs_follow_the_rules(tmp_path):
    for rank in range(2):
        with EventLog(tmp_path, rank) as log:
            for step in range(3):
                log.enter("rollout", step)
                with log.span("rollout", step), log.span("inner", step):
                    log.running(step, 1, 2, 3)
                with log.span("idle", step):
                    log.instant("push", step, version=1)
                log.end_step()
    write_timeline(tmp_path, tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())
    check(trace)
    assert sum(e["ph"] == "X" for e in trace["traceEvents"]) == 2 * 3 * 3


def test_steps_and_ranks_can_be_chosen(tmp_path):
    folder = write_run(tmp_path / "r", ranks=4, steps=5)
    write_timeline(folder, tmp_path / "t.json.gz", steps={2, 3}, ranks={1, 3, 99})
    trace = read(tmp_path / "t.json.gz")
    check(trace)
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == {1, 3} and {e["args"]["step"] for e in slices} == {2, 3}
    with pytest.raises(ConfigError, match="--ranks"):
        write_timeline(folder, tmp_path / "t.json.gz", ranks={9})
    with pytest.raises(ConfigError, match=r"--steps = '7-8': must be among the run's steps: 1 to 5"):
        write_timeline(folder, tmp_path / "t.json.gz", steps={7, 8})
    write_timeline(folder, tmp_path / "t.json.gz", steps={6})  # may have begun


def test_a_torn_log_and_a_run_in_progress(tmp_path):
    folder = write_run(
        tmp_path / "r", steps=2, num_steps=5, speculation=False, idle_training=False, evals=False
    )
    with events_path(folder, 0).open("a") as file:
        file.write('{"ts": 12')
    write_timeline(folder, tmp_path / "t.json.gz")
    check(read(tmp_path / "t.json.gz"))


def test_slices_that_reach_a_little_into_the_next_are_cut():
    def slice_(ts, dur):
        return {"ts": ts, "dur": dur}

    assert nested([slice_(10, 5), slice_(0, 11)]) == [slice_(0, 10), slice_(10, 5)]
    assert nested([slice_(0, 20), slice_(5, 3)]) == [slice_(0, 20), slice_(5, 3)]
    # A slice of no length between two others, and an inner slice that ends too late.
    assert nested([slice_(0, 11), slice_(10, 0), slice_(10, 9)]) == [
        slice_(0, 10),
        slice_(10, 9),
        slice_(10, 0),
    ]
    assert nested([slice_(0, 9000), slice_(500, 8501)]) == [slice_(0, 9000), slice_(500, 8500)]
