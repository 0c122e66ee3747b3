"""Reading what a run has left, whole or not."""

from __future__ import annotations

from contextlib import closing

from megatron_tlt.observe import jsonl
from megatron_tlt.observe.events import EventLog, events_path
from megatron_tlt.observe.page import Samples
from megatron_tlt.observe.report import run_page
from megatron_tlt.observe.runfiles import ranks_of, read_run
from tests.helpers.synthetic_run import write_run


def test_of_a_step_done_twice_the_second_time_counts(tmp_path):
    for turn, steps in (("first", (0, 1, 2)), ("second", (1, 2, 3))):
        with closing(EventLog(tmp_path, 0)) as log:
            for step in steps:
                log.instant(f"{turn} a", step)
                log.instant(f"{turn} b", step)
    found = read_run(tmp_path).events_of_steps(0, {0, 2, 3})
    names = {step: [row["name"] for row in rows] for step, rows in found.items()}
    assert names == {0: ["first a", "first b"], 2: ["second a", "second b"], 3: ["second a", "second b"]}
    assert ranks_of(tmp_path) == [0]


def test_events_of_other_steps_are_not_parsed_and_torn_lines_are_counted(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "r", steps=50)
    with events_path(folder, 0).open("ab") as file:
        file.write(b'{"ts":1.5,"rank":0,"step":7,"kind":"instant","name":"curve","attrs":{"running":[[0,\n')
    parsed, row_of = [], jsonl._row
    monkeypatch.setattr(jsonl, "_row", lambda line: parsed.append(line) or row_of(line))
    run = read_run(folder, with_rollouts=False)
    parsed.clear()
    events = run.events_of_steps(0, [20])[20]
    assert {row["step"] for row in events} == {20} and len(events) > 5
    assert len(parsed) == len(events) + 2, "those of the step, the first one of a start, and the torn one"
    assert [len(lines) for lines in run.skipped.values()] == [1]


def test_of_samples_only_those_that_the_page_shows_are_parsed_and_torn_lines_are_counted(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "r", steps=50)
    with (folder / "samples.jsonl").open("ab") as file:
        file.write(b'{"step":50,"prompt_id":3,"prompt":"2 + \n')
    parsed, row_of = [], jsonl._row
    monkeypatch.setattr(jsonl, "_row", lambda line: parsed.append(line) or row_of(line))
    run = read_run(folder)
    assert not any(b'"response"' in line for line in parsed), "a comparison of two runs reads no more"
    page = run_page(run)
    (shown,) = [part for section in page.sections for part in section.parts if isinstance(part, Samples)]
    steps = [row["step"] for row in shown.rows]
    assert steps == [step for step in range(50, 0, -5) for _ in range(2)]
    assert sum(b'"response"' in line for line in parsed) == len(steps)
    assert page.warnings == [f"{folder / 'samples.jsonl'}: skipped 1 line that cannot be read: 101"]
