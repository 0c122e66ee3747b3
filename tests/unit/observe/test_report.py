"""The report's figures, compared with those of a made-up run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.jsonl import JsonRow, read_rows, to_line
from megatron_tlt.observe.page import Chart, Samples
from megatron_tlt.observe.report import run_page, subtitle
from megatron_tlt.observe.report_charts import longest_rollout
from megatron_tlt.observe.report_compare import comparison, equality, phase_rows
from megatron_tlt.observe.runfiles import read_run
from megatron_tlt.observe.summary import accuracy
from tests.helpers.synthetic_run import write_run


def charts(page) -> dict[str, Chart]:
    return {part.title: part for section in page.sections for part in section.parts if isinstance(part, Chart)}


def samples(page) -> list:
    return next(part.rows for s in page.sections for part in s.parts if isinstance(part, Samples))


def configure(folder: Path, **sections: object) -> Path:
    config = json.loads((folder / "config.json").read_text()) | sections
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def change_samples(folder: Path, change: Callable[[list[JsonRow]], list[JsonRow]]) -> Path:
    path = folder / "samples.jsonl"
    path.write_text("".join(map(to_line, change(list(read_rows(path))))))
    return folder


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"speculation": False, "idle_training": False}, {"Acceptance of drafts"}),
        ({"curves": False}, {"Running requests"}),
    ],
)
def test_charts_have_points_and_those_without_data_are_left_out(tmp_path, options, missing):
    whole = charts(run_page(read_run(write_run(tmp_path / "whole"))))
    part = charts(run_page(read_run(write_run(tmp_path / "part", **options))))
    assert len(whole) == 6 and whole.keys() - part.keys() == missing
    assert all(any(trace.x is not None and len(trace.x) for trace in chart.figure.data) for chart in part.values())


def test_the_teachers_kl_is_in_the_learning_chart(tmp_path):
    run = read_run(write_run(tmp_path / "r"))
    for row in run.steps:
        row["policy/teacher_kl"] = 0.1 / row["step"]
    chart = charts(run_page(run))["Learning"]
    assert [(trace["name"], trace.get("yaxis")) for trace in chart.traces][2:] == [
        ("held out", None),
        ("teacher KL (right)", "y2"),
    ]
    run.evals = []
    for row in run.steps:
        del row["reward/mean"], row["reward/accuracy"]
    chart = charts(run_page(run))["Learning"]
    assert [(trace["name"], trace.get("yaxis")) for trace in chart.traces] == [("teacher KL", None)]
    assert chart.y == "nats a token" and chart.figure.data[0].y[-1] == 0.1 / run.last_step


def test_truncated_responses_are_beside_the_lengths(tmp_path):
    chart = charts(run_page(read_run(write_run(tmp_path / "r"))))["Response length"]
    truncated = chart.traces[-1]
    assert (truncated["name"], truncated["yaxis"]) == ("truncated (right)", "y2") and len(chart.traces) == 5


def test_the_curve_is_the_sum_of_the_ranks_in_the_longest_rollout(tmp_path):
    run = read_run(write_run(tmp_path / "r", ranks=3, steps=2))
    total, drafting = charts(run_page(run))["Running requests"].traces
    view = longest_rollout(run)
    seconds = {row["step"]: row["time/rollout"] + row["time/idle"] for row in run.steps}
    assert seconds[view.step + 1] == max(seconds.values())
    curves = view.curves
    assert total["y"][0] == 3 * 64 and total["y"][-1] == 0 and len(curves) == 3
    for at, running in list(zip(total["x"], total["y"], strict=True))[::10]:
        begun = [[running for moment, running in points if moment <= at] for points in curves.values()]
        assert running == sum(of_rank[-1] for of_rank in begun if of_rank)
    assert drafting["name"] == "drafting" and 0 < max(drafting["y"]) <= 1


@pytest.mark.parametrize(
    ("waits", "longest", "label", "figures"),
    [
        (
            [6.0, 0.0],
            150,
            "tail of the rollouts",
            ["60%", "30% of all", "(0% to 60% of a rank's)", "1.5 x", "3.0x as fast"],
        ),
        ([0.3, 0.1], 150, "rollouts have no tail", ["3%", "2% of all", "1.5 x"]),
        ([0.0], 400, "tail of the rollouts", ["0%", "4.0 x"]),
    ],
)
def test_a_run_without_a_tail_is_named(tmp_path, waits, longest, label, figures):
    run = read_run(write_run(tmp_path / "r", steps=2, ranks=len(waits)))
    idle = sum(waits) / len(waits)
    for row in run.steps:
        row |= {"time/step": 15.0, "time/rollout": 10.0 - idle, "time/idle": idle}
        row |= {"length/median": 100.0, "length/max": float(longest)}
        row |= {f"idle/rank{rank:03d}": seconds for rank, seconds in enumerate(waits)}
    (found,) = [stat for stat in run_page(run).stats if "rollouts" in stat.label]
    assert found.label == label
    assert all(figure in f"{found.value} {found.note}" for figure in figures)


def test_rates_and_shares_of_a_run_are_those_of_all_its_tokens(tmp_path):
    run = read_run(write_run(tmp_path / "r", steps=2))
    for row, tokens, accepted, seconds in zip(run.steps, (900.0, 100.0), (0.0, 50.0), (9.0, 91.0), strict=True):
        row |= {"engine/generated_tokens": tokens, "time/rollout": seconds - 1.0, "time/idle": 1.0}
        row |= {"engine/tokens_per_s": tokens / seconds, "pre_rollout/seconds": 1.0, "pre_rollout/tokens": 80.0}
        row |= {"engine/spec_pre_rolled_accepted": accepted, "pre_rollout/drafted_share": accepted / tokens}
    stats = {stat.label: stat for stat in run_page(run).stats}
    assert stats["rollout"].value == "10"
    assert "5% of all tokens were pre-rolled" in stats["idle time that pre-rolled"].note


DRAFTED = [("", "2"), ("accepted", "+6"), ("refused", "<i>7</i>"), ("given", "=")], [("accepted", "8 <b>bold</b>")]
PLAIN = [("", "2+6"), ("given", "= ")], [("", "8 <b>bold</b>")]


@pytest.mark.parametrize(("speculation", "expected"), [(False, PLAIN), (True, DRAFTED)])
def test_trajectories_are_shown_by_turn(tmp_path, speculation, expected):
    page = run_page(read_run(write_run(tmp_path / "r", speculation=speculation, turns=True)))
    (section,) = [s for s in page.sections if s.parts and isinstance(s.parts[0], Samples)]
    row = section.parts[0].rows[0]
    assert section.title == "Trajectories" and "aborted: timeout" in row["facts"]
    (first, shown), (second, last) = row["parts"]
    calls = 'calls add {"a": 2} · a call that cannot be made: no JSON'
    assert first == f"turn 1 · {calls} · reward 0.5 · waited 0.25 s for the environment"
    assert second == "turn 2 · waited 30.00 s for the environment"
    assert tuple([part for part in stretch if part[1]] for stretch in (shown, last)) == expected
    assert "turn 2 · waited 30.00 s" in page.html()


@pytest.mark.parametrize(
    ("functions", "verdicts"),
    [
        ([{"name": "python", "threshold": "auto"}], {"correct", "below 1"}),
        ([{"name": "python", "threshold": 0.9}], {"correct", "wrong"}),
        ([{"name": "exact", "threshold": "auto"}], {"correct", "wrong"}),
        ([], {"not judged"}),
    ],
)
def test_only_where_a_threshold_is_known_a_response_is_called_wrong(tmp_path, functions, verdicts):
    page = run_page(read_run(configure(write_run(tmp_path / "r"), rewards={"functions": functions})))
    assert {row["verdict"] for row in samples(page)} == verdicts
    assert all(f">{verdict}</b>" in page.html() for verdict in verdicts)
    assert all(("reward" in row["facts"]) == bool(functions) for row in samples(page))


def test_a_reward_that_failed_and_tokens_that_are_not_shown_are_named(tmp_path):
    last = {"failure": "exact: no result within 10 s", "tokens": 1200}
    folder = change_samples(write_run(tmp_path / "r"), lambda rows: [*rows[:-1], rows[-1] | last])
    page = run_page(read_run(folder))
    first, second = samples(page)[:2]
    assert first["verdict"] == "not judged" and "reward failed: exact: no result within 10 s" in first["facts"]
    assert '<b class="muted">not judged</b>' in page.html()
    assert first["parts"][0][1][-1] == ("", " … (1200 tokens)")
    assert not any("tokens)" in text for _, text in second["parts"][0][1])


def test_of_many_samples_a_step_those_of_every_step_are_shown_in_pairs(tmp_path):
    folder = change_samples(
        write_run(tmp_path / "r", steps=12),
        lambda rows: [row | {"prompt_id": i} for at in range(0, 24, 2) for i in range(4) for row in rows[at : at + 2]],
    )
    run = read_run(folder)
    run.steps = run.steps[:11]
    shown = Counter((row["step"], row["prompt_id"]) for row in samples(run_page(run)))
    assert shown == {(step, prompt): 2 for step in range(1, 12) for prompt in range(2)}


def test_rewards_that_teach_nothing_are_named_at_the_top(tmp_path):
    run = read_run(configure(write_run(tmp_path / "r", steps=4), algorithm={"name": "grpo"}))
    assert run_page(run).warnings == []
    for row in run.steps[1:]:
        row["reward/equal_groups"] = 1.0
    (warning,) = run_page(run).warnings
    *_, last = run.samples([4])
    assert "equal rewards in the last 3 steps" in warning and f"reward {last['reward']}." in warning


def test_a_run_before_its_first_step(tmp_path):
    folder = write_run(tmp_path / "r", steps=0, num_steps=5)
    page = run_page(read_run(folder))
    assert "No step is done yet" in page.headline and "0 of 5 steps" in page.subtitle and page.html()
    (folder / "metrics.jsonl").unlink()
    assert run_page(read_run(folder)).html()


def test_lines_that_cannot_be_read_are_named(tmp_path):
    folder = write_run(tmp_path / "r", steps=3)
    names = ("events/rank-00001.jsonl", "metrics.jsonl", "rollouts.jsonl", "samples.jsonl")
    for name, line in zip(names, (b'{"step": 3, "ti', b'{"step": "x"}', b"\xff\xfe\x00", b"[1]"), strict=True):
        with (folder / name).open("ab") as file:
            file.write(line + b"\n")
    run = read_run(folder)
    assert run.last_step == 3
    page = run_page(run)
    lines = {name: len((folder / name).read_bytes().splitlines()) for name in names}
    assert page.warnings == [
        f"{folder}/{name}: skipped 1 line that cannot be read: {last}" for name, last in lines.items()
    ]
    assert all(warning in page.html() for warning in page.warnings)
    (folder / "metrics.jsonl").write_bytes(b"[1]")
    with pytest.raises(ConfigError, match=r"nothing could be read: .*metrics\.jsonl: skipped 1 line"):
        run_page(read_run(folder))


def test_two_runs_with_the_same_responses_are_compared_in_speed_and_settings(tmp_path):
    slow = write_run(tmp_path / "slow", steps=7, pace=2.0, speculation=False)
    a, b = read_run(slow), read_run(write_run(tmp_path / "fast", steps=7))
    for row in a.steps:
        row["time/log"] = 99.0  # of the step before, so not of its time
    ratio = sum(a.column("time/step")[1]) / sum(b.column("time/step")[1])
    text = comparison(a, b)
    assert text.startswith(f"Same responses and rewards in all 7 common steps. fast is {ratio:.2f}× as fast")
    assert "most of it in rollout" in text and f"fast is {ratio:.2f}×" in comparison(b, a)
    assert phase_rows((a, b))[0][0] == "rollout"
    _, _, differences, seconds, results = ([line.split() for line in part.splitlines()] for part in text.split("\n\n"))
    assert differences[1:3] == [["field", "slow", "fast"], ["rollout.speculation.drafter", "none", "eagle"]]
    assert len(differences) == 4 and differences[3][0] == "state"
    assert seconds[2][0] == "rollout" and seconds[-1][:2] == ["whole", "step"] and seconds[-1][-1] == f"{ratio:.2f}"
    assert results[2][:4] == ["held-out", "accuracy,", "step", "7"] and results[2].count("±") == 2


def test_settings_are_compared_whole_and_shown_where_they_differ(tmp_path):
    runs = []
    for threshold, end in ((0.5, "x"), (0.9, "y")):
        function = {"name": "python", "path": "a" * 100, "threshold": threshold}
        folder = write_run(tmp_path / f"run {end}")
        configure(folder, rewards={"functions": [function]}, data={"system_prompt": f"{'b ' * 100}{end}"})
        runs.append(read_run(folder))
    lines = [line.split() for line in comparison(*runs).splitlines()]
    assert ["rewards.functions.0.threshold", "0.5", "0.9"] in lines
    (prompt,) = [line for line in lines if line[:1] == ["data.system_prompt"]]
    assert "x" in prompt and "y" in prompt and len(prompt) < 70
    assert not any(line[:1] == ["rewards.functions.0.path"] for line in lines), "it is the same"


def test_evaluations_after_the_same_steps_are_compared(tmp_path):
    a, b = (read_run(write_run(tmp_path / name)) for name in ("a", "b"))
    of = {step: {"step": step, "eval/pass@1": step / 10, "eval/stderr": 0.02} for step in (0, 3, 5, 7, 9)}
    a.evals, b.evals = [of[0], of[5], of[7]], [of[0], of[5], of[9]]
    assert "\nheld-out accuracy, step 5  0.500 ± 0.020  0.500 ± 0.020\n" in squeezed(comparison(a, b))
    a.evals, b.evals = [of[0], of[3]], [of[0], of[9]]
    last = "0.300 ± 0.020 after step 3  0.900 ± 0.020 after step 9"
    assert f"\nheld-out accuracy, last  {last}\n" in squeezed(comparison(a, b))
    a.evals, b.evals = [of[3]], [of[0]]
    notes = [stat.note for run in (a, b) for stat in run_page(run).stats if stat.label == "held-out accuracy"]
    assert notes == ["± 0.020, after step 3", "± 0.020, before the first step"]
    a.evals = [of[0] | {"eval/seconds": 70.0}, of[3] | {"eval/stderr": 0.015, "eval/seconds": 60.0}]
    stats = {stat.label: stat for stat in run_page(a).stats}
    assert stats["held-out accuracy"].note == "± 0.015, from 0.000 ± 0.020: +0.300 ± 0.025"
    assert stats["evaluating"].value == "2 min 10 s" and stats["evaluating"].note.startswith("2 evaluations, ")


@pytest.mark.parametrize(
    ("changed", "is_other"),
    [
        ("rewards.functions.0.threshold", True),
        ("held_out.data.eval", True),
        ("tokenizer.model.path", True),
        ("rollout.top_p", True),
        ("rollout.max_tokens", False),  # `eval.max_tokens` is set
        ("rollout.temperature", False),
        ("eval.every", False),
        ("optimizer.lr", False),
    ],
)
def test_evaluations_that_measure_otherwise_are_no_rise(tmp_path, changed, is_other):
    folder = write_run(tmp_path / "r")
    (folder / "config_changes.jsonl").write_text(to_line({"step": 3, "changed": {changed: [1, 2]}}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eval": {"max_tokens": 9, "top_p": None}}))
    run = read_run(folder)
    run.evals = [{"step": step, "eval/pass@1": step / 10, "eval/stderr": 0.02} for step in (0, 3, 6, 9)]
    (note,) = [stat.note for stat in run_page(run).stats if stat.label == "held-out accuracy"]
    assert ("+0.300" in note and "measured otherwise" in note) if is_other else "+0.900" in note


def test_an_unknown_standard_error_is_left_out():
    assert accuracy({"eval/pass@1": 1.0, "eval/stderr": None}) == "1.000"
    assert accuracy({"eval/pass@1": 1.0, "eval/stderr": 0.0}) == "1.000 ± 0.000"


def test_ranks_are_those_of_the_last_step(tmp_path):
    """Of 8 ranks that were resumed on 4 all have event logs."""
    run, fewer = (read_run(write_run(tmp_path / f"{ranks}", ranks=ranks)) for ranks in (8, 4))
    run.steps[-1] = fewer.steps[-1]
    assert "4 ranks" in subtitle(run) and len(run.ranks) == 8
    assert "8 ranks" in subtitle(read_run(write_run(tmp_path / "r", ranks=8, steps=0)))


def test_steps_with_responses_of_the_rollout_cache_are_in_no_time(tmp_path):
    a, b = (read_run(write_run(tmp_path / name, steps=3)) for name in ("a", "b"))
    b.steps[1] |= {"rollout_cache/reused": 480.0, "time/rollout": 0.0, "time/idle": 0.0, "time/step": 0.1}
    text = comparison(a, b)
    assert "They are equally fast" in text and "Left out of times and means: step 2, with" in text
    assert "Seconds a step, of 2 steps:" in text
    note = next(stat.note for stat in run_page(b).stats if stat.label == "steps")
    first, _, last = (row["time/step"] for row in b.steps)
    assert note.startswith(f"{(first + last) / 2:.3g} s each, ")
    b.steps[0]["rollout_cache/reused"] = a.steps[2]["rollout_cache/reused"] = 1.0
    text = comparison(a, b)
    assert "Nothing is known of their speed" in text and "steps 1, 2, 3, with" in text


def squeezed(table: str) -> str:
    return re.sub("   +", "  ", table)


def test_runs_of_other_responses_are_compared_by_tokens(tmp_path):
    runs = []
    for name, tokens, pace in (("short", 4e4, 1.0), ("long", 16e4, 2.0)):
        runs.append(read_run(write_run(tmp_path / name, pace=pace, responses=name)))
        for row in runs[-1].steps:  # dynamic sampling trains on few of the longer responses
            row |= {"engine/generated_tokens": tokens, "length/mean": 100.0, "rollout/samples": 10.0}
    a, b = (sum(run.column("time/step")[1]) / (len(run.steps) * n) for run, n in zip(runs, (1, 4), strict=True))
    assert a > b, "a step of the long responses takes longer, and a token of them does not"
    text = comparison(*runs)
    assert f"long is {a / b:.2f}× as fast by" in text
    x, y = map(float, re.findall(r"by ([\d.]+) s against ([\d.]+) s for 1,000 generated tokens", text)[0])
    assert x < 0.2 and x / y == pytest.approx(a / b, rel=0.01)
    assert "× as fast (" not in text
    configure(tmp_path / "long", model={"path": "another"})
    text = comparison(runs[0], read_run(tmp_path / "long"))
    assert "They differ in model, so their speeds are not compared." in text and "as fast" not in text


def test_runs_without_digests_are_compared_in_speed_alone(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    (b / "rollouts.jsonl").unlink()
    text = comparison(read_run(a), read_run(b))
    assert "not known" in text and "equally fast" in text


def test_runs_of_the_same_responses_and_other_rewards_are_compared_by_steps(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", pace=2.0)
    rows = [json.loads(line) | {"rewards": "x"} for line in (b / "rollouts.jsonl").read_text().splitlines()]
    (b / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = comparison(read_run(a), read_run(b))
    assert "but other rewards" in text and "× as fast (" in text and "other work" not in text


def test_equality_names_the_first_step_that_differs():
    rows = [{"step": s, "responses": "a", "rewards": "b"} for s in range(1, 6)]
    other = [dict(row) for row in rows]
    assert equality(rows, other) == (True, "Same responses and rewards in all 5 common steps.")
    other[3]["rewards"] = "x"
    assert equality(rows, other) == (False, "Same responses in all 5 common steps, but other rewards from step 4 on.")
    other[2]["responses"] = "x"
    said = "Not the same responses: they differ from step 3 on (of all 4 common steps)."
    assert equality(rows, other[1:]) == (False, said)
