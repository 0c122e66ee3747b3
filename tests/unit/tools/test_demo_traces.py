"""The demo curriculum: traces are right, repeatable, cheap in tokens, and of widely varying length."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import demo_traces
import make_demo_policy
import pytest


@pytest.fixture(scope="module")
def examples() -> list[demo_traces.Example]:
    return list(demo_traces.generate(400, seed=3))


@pytest.mark.parametrize(
    ("expression", "scratchpad", "answer"),
    [
        ("57 + 87 + 5", "7+7=14,5+8+1=14=144\n144 + 5\n4+5=9,4+0=4,1+0=1=149", "149"),
        ("20 + 80", "0+0=0,2+8=10=100", "100"),
        ("9 + 999", "9+9=18,0+9+1=10,0+9+1=10=1008", "1008"),
    ],
)
def test_a_sum_is_worked_column_by_column_units_first(expression, scratchpad, answer):
    assert demo_traces.sum_trace(expression) == (scratchpad, answer)


def test_every_trace_satisfies_its_verifier_and_a_wrong_answer_does_not(examples):
    datasets = {task.name: demo_traces.open_dataset(task, 0, 1) for task in demo_traces.MIX}
    for example in examples:
        dataset = datasets[example.task]
        assert demo_traces.is_correct(dataset, example.completion, example.entry)
        spoilt = example.completion.replace("<answer>", "<answer>1")
        assert not demo_traces.is_correct(dataset, spoilt, example.entry), example.prompt
        assert not demo_traces.is_correct(dataset, example.completion.replace("</answer>", ""), example.entry)


def test_a_model_is_written_over_only_where_it_is_asked_for(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        make_demo_policy.main(["--moe", "--out", str(tmp_path)])
    assert "exists: --overwrite replaces it" in capsys.readouterr().err


def test_the_training_reads_the_data_that_was_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = []

    def run(command, **options):
        started.append((command, Path(options.get("cwd", "."))))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(make_demo_policy.subprocess, "run", run)
    given = ["--student", "--examples", "1", "--heldout", "1"]
    assert make_demo_policy.main(["--work", "W", "--out", "O", *given]) == 0
    ((command, directory),) = started
    paths = dict(word.split("=", 1) for word in command if word.startswith("sft.") and "_path=" in word)
    assert [(directory / path).resolve() for path in paths.values()] == [
        tmp_path / "W" / name for name in ("train.jsonl", "heldout.jsonl")
    ]
