"""The trace: by the rules of the Trace Event Format, and with everything that the events say."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise

import pytest

from megatron_tlt.errors import ConfigError
from megatron_tlt.observe import jsonl
from megatron_tlt.observe.runfiles import read_run
from megatron_tlt.observe.timeline import write_timeline
from tests.helpers.events import read_events
from tests.helpers.synthetic_run import write_run

METADATA = {"process_name", "process_sort_index", "thread_name"}


def check(trace: dict) -> None:
    """The rules for the kinds of event that are used: required fields, types, and order on every thread."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
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
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        for (_, end), (start, _) in pairwise(sorted(slices)):
            assert end <= start, "slices of one thread follow each other"


def read(path) -> dict:
    return json.loads(gzip.decompress(path.read_bytes()))


@pytest.mark.parametrize("turns", [False, True])
def test_a_trace_follows_the_rules_and_loses_nothing(tmp_path, turns):
    folder = write_run(tmp_path / "r", ranks=3, steps=4, turns=turns)
    count = write_timeline(read_run(folder), tmp_path / "t.json.gz")
    trace = read(tmp_path / "t.json.gz")
    check(trace)
    assert count == len(trace["traceEvents"])
    for rank in range(3):
        spans = [e for e in read_events(folder, rank) if e["kind"] in ("span", "state")]
        slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == rank]
        assert len(slices) == len(spans)
        assert sum(e["dur"] for e in slices) == pytest.approx(1e6 * sum(e["dur"] for e in spans), abs=100)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 2"}
    lanes = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert lanes == {"phases", "state", *(["environments"] if turns else [])}
    counters = {e["name"] for e in trace["traceEvents"] if e["ph"] == "C"}
    assert counters == {"running requests", "steps that draft"}
    assert min(e["ts"] for e in trace["traceEvents"] if "ts" in e) == 0


def test_steps_can_be_chosen(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "r", ranks=4, steps=5)
    run, parsed, row_of = read_run(folder), [], jsonl._row
    monkeypatch.setattr(jsonl, "_row", lambda line: parsed.append(line) or row_of(line))
    write_timeline(run, tmp_path / "t.json.gz", steps={2, 3})
    assert not any(b'"step":4,' in line for line in parsed)
    trace = read(tmp_path / "t.json.gz")
    check(trace)
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == {0, 1, 2, 3} and {e["args"]["step"] for e in slices} == {2, 3}
    with pytest.raises(ConfigError, match=r"--steps = '7, 8': must be among the run's steps: 1 to 5"):
        write_timeline(read_run(folder), tmp_path / "t.json.gz", steps={7, 8})
    write_timeline(read_run(folder), tmp_path / "t.json.gz", steps={6})  # may have begun
