"""Reading what a run has left, whole or not."""

from __future__ import annotations

from contextlib import closing

import pytest

from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.events import EventLog
from megatron_tlt.observe.runfiles import ranks_of, read_run
from tests.helpers.synthetic_run import write_run


def test_steps_and_evaluations_are_separated(tmp_path):
    run = read_run(write_run(tmp_path / "r", ranks=3, steps=4))
    assert [row["step"] for row in run.steps] == [1, 2, 3, 4]
    assert [row["step"] for row in run.evals] == [0, 4]
    assert (run.ranks, run.last_step, run.num_steps, run.is_finished) == ([0, 1, 2], 4, 4, True)
    assert run.column("reward/mean") == ([1, 2, 3, 4], [0.51, 0.52, 0.53, 0.54])
    assert run.column("no/such") == ([], [])


@pytest.mark.parametrize("make", [False, True])
def test_what_is_no_run_is_refused_by_name(tmp_path, make):
    folder = tmp_path / "none"
    if make:
        folder.mkdir()
    with pytest.raises(ConfigError, match=r"RUN_DIR = .*none"):
        read_run(folder)


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
