"""benchmarks/real.py: its worked solutions, its refusals, and the record of parts that are kept."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_tlt.config.load import load_config
from tests.helpers.mpi import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import real
from lib import real_data


def test_a_worked_sum_has_a_line_for_each_term():
    entry = {"metadata": {"expression": "6 - 15 + 100"}, "answer": "91"}
    lines = ["Start with 6.", "Subtract 15: 6 - 15 = -9.", "Add 100: -9 + 100 = 91.", "<answer>91</answer>"]
    assert real_data.worked_sum(entry).splitlines() == lines
    with pytest.raises(ValueError, match="= 91, and not 92"):
        real_data.worked_sum(entry | {"answer": "92"})


def test_solutions_of_the_runs_tasks_are_rewarded_and_have_a_long_tail(tmp_path: Path):
    config = load_config(real.CONFIG)
    path = tmp_path / "solutions.jsonl"
    real_data.write_solutions(config.data.train, 200, path, seed=5)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 200 and len({row["prompt"] for row in rows}) > 180
    assert all(row["completion"].count("<answer>") == 1 and "####" not in row["completion"] for row in rows)
    lengths = sorted(len(row["completion"]) for row in rows)
    assert lengths[-1] > 3.5 * lengths[100]  # in characters; in tokens, a digit each, more
    words = [row for row in rows if not row["prompt"].startswith("State the final answer")]
    assert 18 < len(words) < 45  # 15 %
    task = config.data.train.tasks[0].model_copy(update={"name": "spell_backward"})
    other = config.data.train.model_copy(update={"tasks": (task,)})
    with pytest.raises(ValueError, match="no worked solutions of spell_backward: only of chain_sum, gsm_symbolic"):
        real_data.write_solutions(other, 1, path, seed=5)


def arguments(tmp_path: Path, *words: str) -> Namespace:
    return real.parse_arguments(["--work", str(tmp_path / "work"), "--out", str(tmp_path / "r.json"), *words])


def test_what_is_no_model_and_another_models_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    with pytest.raises(SystemExit, match="--model = 'no/such-model'"):
        real.check(arguments(tmp_path, "--model", "no/such-model"))
    with pytest.raises(SystemExit, match=r"no config\.json there"):
        real.check(arguments(tmp_path, "--model", str(tmp_path)))
    real.check(arguments(tmp_path))
    real.check(arguments(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="holds the parts of SmolLM2-135M-Instruct, and not of"):
        real.check(arguments(tmp_path, "--model", str(tmp_path)))


def test_aims_are_judged_where_their_parts_have_run():
    figures = {"plain_cost": 1.03, "accept_first": 2.0, "accept_last": 2.0, "accept_frozen": 2.0}
    assert [line.rsplit(": ", 1)[1] for line in real.aims(figures)] == ["MISSED", "met", "MISSED"]


def test_a_part_before_its_time_is_refused(tmp_path: Path):
    args = arguments(tmp_path, "--parts", "grpo")
    real.check(args)
    with pytest.raises(SystemExit, match="cold-start is not there: run the parts before this one first"):
        real.run_parts(args)


def test_a_part_that_is_done_is_kept_and_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[str] = []

    def part(name: str):
        def run(chain: real.Chain) -> real.Found:
            ran.append(f"{name} {chain.kind}" if chain.kind != "eagle" else name)
            return [{"of": name}], {name: float(len(ran))}

        return run

    monkeypatch.setattr(real, "PARTS", {name: part(name) for name in ("model", "sft", "grpo")})
    for words in (["--parts", "model", "sft"], ["--parts", "sft", "grpo"], ["--parts", "sft", "--again"]):
        args = arguments(tmp_path, *words)
        real.check(args)
        real.run_parts(args)
    assert ran == ["model", "sft", "grpo", "sft"]
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["summary"] == {"model": 1.0, "sft": 4.0, "grpo": 3.0}
    assert [row["of"] for row in record["rows"] if "of" in row] == ["model", "sft", "grpo"]
    assert record["machine"]
    monkeypatch.setattr(real, "LEGEND", {"model": "m", "sft": "s", "grpo": "jobs"})
    by_kind = real.run_parts(arguments(tmp_path, "--drafter", "eagle", "dspark"))
    assert ran[4:] == ["grpo dspark"], "the model and its cold start are of all kinds"
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["summary"] == {"model": 1.0, "sft": 4.0, "grpo": 3.0, "dspark/grpo": 5.0}
    assert [row["drafter"] for row in record["rows"] if row.get("of") == "grpo"] == ["eagle", "dspark"]
    assert real.side_by_side(by_kind)[-1].split() == ["jobs", "3.000", "5.000"]
