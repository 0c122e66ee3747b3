"""The report's figures, compared with what the made-up run was made of."""

from __future__ import annotations

import time

import pytest

from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.page import Chart, Table
from megatron_tlt.observe.report import run_page
from megatron_tlt.observe.report_compare import compare_page, equality, phase_rows
from megatron_tlt.observe.report_rollout import step_views
from megatron_tlt.observe.runfiles import read_run
from tests.helpers.synthetic_run import SLOW_RANK, write_run


def charts(page) -> dict[str, Chart]:
    return {
        part.title: part for section in page.sections for part in section.parts if isinstance(part, Chart)
    }


def test_every_chart_of_a_whole_run_is_there(tmp_path):
    page = run_page(read_run(write_run(tmp_path / "r", ranks=3, steps=6)))
    assert charts(page).keys() == {
        "Reward and accuracy of the rollouts",
        "Held-out accuracy",
        "Step time by phase",
        "Running requests",
        "What each rank did",
        "Accepted length by step",
        "Accepted by draft position",
        "Worth in serving",
        "Accepted length by batch size",
        "Strategies",
        "Drafter loss",
        "1 − TV",
        "Distribution by step",
        "Response length",
        "Idle and recovered seconds",
        "Idle seconds by rank",
    }
    for chart in charts(page).values():
        groups = [chart.traces, *chart.choices.values()]
        assert any(any(len(trace["x"]) for trace in traces) for traces in groups), chart.title


def test_what_a_drafter_is_worth_in_serving_is_the_sum_of_what_is_accepted(tmp_path):
    run = read_run(write_run(tmp_path / "r", steps=6))
    drafted = sum(row["drafted_at"][0] for row in run.rollouts)
    accepted = [sum(column) for column in zip(*(row["accepted_at"] for row in run.rollouts), strict=True)]
    (worth,) = charts(run_page(run))["Worth in serving"].traces
    assert list(worth["y"]) == pytest.approx(
        [1 + sum(accepted[: n + 1]) / drafted for n in range(len(accepted))]
    )
    assert worth["y"][0] > 1


def test_the_curve_is_the_sum_of_the_ranks(tmp_path):
    run = read_run(write_run(tmp_path / "r", ranks=3, steps=2))
    total, *others = charts(run_page(run))["Running requests"].choices["2"]
    curves = step_views(run)[1].curves
    assert total["y"][0] == 3 * 64 and total["y"][-1] == 0 and len(curves) == 3
    for at, running in list(zip(total["x"], total["y"], strict=True))[::10]:
        begun = [[running for moment, running in points if moment <= at] for points in curves.values()]
        assert running == sum(of_rank[-1] for of_rank in begun if of_rank)
    assert any(trace["name"].startswith("speculation starts") for trace in others)


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"speculation": False}, {"Strategies", "Accepted length by step", "Accepted by draft position"}),
        ({"idle_training": False}, {"Drafter loss", "1 − TV"}),
        ({"evals": False}, {"Held-out accuracy"}),
        ({"curves": False}, {"Running requests"}),
        ({"ranks": 1}, {"Idle seconds by rank", "Idle and recovered seconds"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_run_does_not_have_is_left_out(tmp_path, options, missing):
    page = run_page(read_run(write_run(tmp_path / "r", **options)))
    assert not missing & charts(page).keys()
    assert "Step time by phase" in charts(page) and page.html()


def test_a_run_before_its_first_step(tmp_path):
    folder = write_run(tmp_path / "r", steps=0, num_steps=5)
    page = run_page(read_run(folder))
    assert "No step is done yet" in page.verdict and page.html()
    (folder / "metrics.jsonl").unlink()
    assert run_page(read_run(folder)).html()


def test_hundreds_of_ranks_in_little_time_and_space(tmp_path):
    folder = write_run(tmp_path / "big", ranks=512, steps=10)
    started = time.process_time()
    page = run_page(read_run(folder))
    html = page.html()
    assert time.process_time() - started < 30
    plotly = len(run_page(read_run(write_run(tmp_path / "small", ranks=2, steps=1))).html())
    assert len(html) < plotly + 1_500_000
    assert len(charts(page)["Running requests"].choices) >= 10
    assert charts(page)["Idle seconds by rank"].traces[0]["y"][SLOW_RANK] == 0.0
    shares = charts(page)["What 512 ranks did"].choices["10"]
    assert [sum(trace["y"][i] for trace in shares) for i in (5, 80, 150)] == [512, 512, 512]
    lanes = charts(page)["The slowest and the quickest of 512 ranks"].choices["10"]
    names = {name for trace in lanes for name in trace["y"]}
    assert len(names) == 24 and f"rank {SLOW_RANK}" in names


@pytest.mark.parametrize("line", [b'{"step": 3, "ti', b"\xff\xfe\x00", b'{"step": "x"}', b"[1]"])
def test_lines_that_cannot_be_read_are_named(tmp_path, line):
    folder = write_run(tmp_path / "r", steps=3)
    names = ("events/rank-00001.jsonl", "metrics.jsonl", "rollouts.jsonl", "samples.jsonl")
    for name in names:
        with (folder / name).open("ab") as file:
            file.write(line + b"\n")
    (folder / "summary.json").write_text('{"half')
    run = read_run(folder)
    assert not run.is_finished and run.last_step == 3
    page = run_page(run)
    lines = {name: len((folder / name).read_bytes().splitlines()) for name in names} | {"summary.json": 1}
    assert page.warnings == [
        f"{folder}/{name}: skipped 1 line that cannot be read: {last}" for name, last in lines.items()
    ]
    assert all(warning in page.html() for warning in page.warnings)
    (folder / "metrics.jsonl").write_bytes(line)
    with pytest.raises(ConfigError, match=r"nothing could be read: .*metrics\.jsonl: skipped 1 line"):
        run_page(read_run(folder))


def test_same_responses_other_speed(tmp_path):
    slow = write_run(tmp_path / "slow", steps=5, pace=2.0)
    fast = write_run(tmp_path / "fast", steps=5, pace=1.0)
    a, b = (read_run(folder) for folder in (slow, fast))
    page = compare_page(a, b)
    ratio = sum(a.column("time/step")[1]) / sum(b.column("time/step")[1])
    assert page.tone == "good"
    assert page.verdict.startswith("Same responses and rewards in all 5 common steps. fast is ")
    assert f"{ratio:.2f}× as fast" in page.verdict and "most of it in rollout" in page.verdict
    assert f"fast is {ratio:.2f}×" in compare_page(b, a).verdict
    assert phase_rows((a, b))[0][0] == "rollout" and page.html()


def test_settings_that_differ_are_named_once(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", speculation=False)
    page = compare_page(read_run(a), read_run(b))
    (table,) = (part for part in page.sections[0].parts if isinstance(part, Table))
    assert table.rows[0] == ("rollout.speculation.drafter", "eagle", "none") and len(table.rows) == 2
    lines = [trace["name"] for trace in charts(page)["Accepted length by step"].traces]
    assert lines == ["accepted length, A"], "B has none"
    assert len(charts(page)["Held-out accuracy"].traces) == 4


def test_other_responses_and_unknown_ones(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", responses="c")
    page = compare_page(read_run(a), read_run(b))
    assert page.tone == "bad" and "Not the same responses: they differ from step 1 on" in page.verdict
    (b / "rollouts.jsonl").unlink()
    page = compare_page(read_run(a), read_run(b))
    assert page.tone == "" and "not known" in page.verdict and "equally fast" in page.verdict


def test_equality_names_the_first_step_that_differs():
    rows = [{"step": s, "responses": "a", "rewards": "b"} for s in range(1, 6)]
    other = [dict(row) for row in rows]
    assert equality(rows, other) == ("good", "Same responses and rewards in all 5 common steps.")
    other[3]["rewards"] = "x"
    assert equality(rows, other) == ("bad", "Same responses in all 5 common steps, but other rewards from step 4 on.")
    other[2]["responses"] = "x"
    said = "Not the same responses: they differ from step 3 on (of all 4 common steps)."
    assert equality(rows, other[1:]) == ("bad", said)
