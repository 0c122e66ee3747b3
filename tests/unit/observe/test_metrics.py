import sys
from types import SimpleNamespace

import pytest

from megatron_tlt.config.run import ObserveSection
from megatron_tlt.observe.jsonl import read_rows
from megatron_tlt.observe.metrics import METRICS_FILE, TENSORBOARD_DIR, MetricsLogger, wandb_problems

JSONL_ONLY = ObserveSection(tensorboard=False)


def steps(run_dir):
    return [row["step"] for row in read_rows(run_dir / METRICS_FILE)]


def test_no_step_is_there_twice_after_a_resume(tmp_path):
    other = MetricsLogger(tmp_path / "other", JSONL_ONLY, rank=1)
    other.log(1, {"a": 1.0})
    assert not (tmp_path / "other").exists(), "rank 0 writes"
    first = MetricsLogger(tmp_path, JSONL_ONLY, 0)
    for step in (1, 2, 3):
        first.log(step, {"run": 1.0})
    resumed = MetricsLogger(tmp_path, JSONL_ONLY, 0, start_step=1)
    resumed.log(2, {"run": 2.0})
    assert steps(tmp_path) == [1, 2]
    assert [row["run"] for row in read_rows(tmp_path / METRICS_FILE)] == [1.0, 2.0]
    MetricsLogger(tmp_path, JSONL_ONLY, 0, start_step=0)
    assert steps(tmp_path) == [], "a new run in an old directory"


@pytest.mark.slow
def test_tensorboard_gets_scalars(tmp_path):
    logger = MetricsLogger(tmp_path, ObserveSection(), 0)
    logger.log(1, {"reward/mean": 0.25})
    logger.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / TENSORBOARD_DIR)).Reload()
    assert [e.value for e in events.Scalars("reward/mean")] == [0.25]


def test_wandb_continues_its_run_and_has_a_row_a_turn(tmp_path, monkeypatch):
    calls = []
    run = SimpleNamespace(id="abc", define_metric=lambda *_, **__: None, log=calls.append, finish=lambda: None)

    def init(**given):
        calls.append({"resumed": given["id"]})
        return run

    def table(columns, data):
        return [dict(zip(columns, row, strict=True)) for row in data]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Table=table))
    for start in (0, 1, 0):  # the last one is a new run in the same directory
        logger = MetricsLogger(tmp_path, ObserveSection(wandb_project="p", tensorboard=False), 0, start)
        logger.log(start + 1, {"a": 1.0, "idle/rank000": 0.5})
        turns = [{"response": "f", "calls": [{"name": "f"}], "observation": "2", "reward": 0.5, "seconds": 0.1}]
        turns.append({"response": "2"})
        logger.log_samples(start + 1, [{"response": "2", "reward": 1.0, "turns": turns}, {"response": "x"}])
        logger.close()
    (first, *_) = [row["samples"] for row in calls if "samples" in row]
    of_turn = [(row["turn"], row["turn_response"], row["calls"], row["turn_observation"]) for row in first]
    assert of_turn == [(1, "f", '[{"name": "f"}]', "2"), (2, "2", None, None), (1, "x", None, None)]
    assert [(row["reward"], row["turn_reward"]) for row in first[:2]] == [(1.0, 0.5), (1.0, None)]
    assert [row["resumed"] for row in calls if "resumed" in row] == [None, "abc", None]
    assert {"step": 2, "a": 1.0} in calls


def test_missing_wandb_is_a_clear_error(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = wandb_problems("p")
    assert str(problem).startswith("observe.wandb_project = 'p': needs the package wandb")
    assert wandb_problems(None) == []
