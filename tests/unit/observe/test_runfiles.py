"""Reading what a run has left, whole or not."""

from __future__ import annotations

from contextlib import closing

from megatron_tlt.observe.events import EventLog
from megatron_tlt.observe.runfiles import ranks_of, read_run


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
