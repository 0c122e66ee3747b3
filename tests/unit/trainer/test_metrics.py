"""What a start leaves of earlier starts' files in its run directory; metrics that a step does not have."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import Config
from megatron_tlt.idle.window import WindowReport
from megatron_tlt.observe.metrics import METRICS_FILE
from megatron_tlt.observe.reduction import reduced, values_of
from megatron_tlt.observe.rollouts import RESPONSES_DIR, ROLLOUTS_FILE, SAMPLES_FILE
from megatron_tlt.observe.runfiles import ranks_of
from megatron_tlt.trainer.evaluation import EvalResult
from megatron_tlt.trainer.metrics import RunMetrics, _acceptance, window_metrics
from megatron_tlt.trainer.recovery import TrainState
from megatron_tlt.types import EngineStats, Prompt, RewardResult, Sample, SampleGroup
from tests.helpers.events import read_events


def metrics_of(
    run_dir: Path, ranks: int = 1, steps_done: int = 0, rank: int = 0, samples: int = 1, **sections: Any
) -> RunMetrics:
    tree = {
        "model": {"path": "m"},
        "train": {"run_dir": str(run_dir)},
        "observe": {"save_responses": True, "samples_per_step": samples, "tensorboard": False, "progress": "none"},
        **sections,
    }
    world: Any = SimpleNamespace(
        rank=rank,
        size=ranks,
        is_main=rank == 0,
        device=torch.device("cpu"),
        enter=lambda *_: None,
        all_gather_object=lambda mine: [mine],
    )
    return RunMetrics(build_config(tree, [], Config), world, TrainState(steps_done))


def start(run_dir: Path, ranks: int, steps_done: int, rank: int = 0, samples: int = 1) -> None:
    """A start that is killed in its first step."""
    with closing(metrics_of(run_dir, ranks, steps_done, rank, samples)) as metrics:
        metrics.start()
        with metrics.phase(f"of {ranks} ranks"):
            pass
        assert metrics._responses is not None
        metrics._responses.write_rows(steps_done + 1, {})
        if metrics._samples is not None:
            metrics._samples.write_rows(steps_done + 1, {})


def test_a_start_that_saves_no_responses_keeps_those_of_steps_that_are_done(tmp_path: Path) -> None:
    start(tmp_path, 1, 0)
    start(tmp_path, 1, 1)
    quiet = {"save_responses": False, "tensorboard": False, "progress": "none"}
    with closing(metrics_of(tmp_path, 1, 1, observe=quiet)) as metrics:
        metrics.start()
    (file,) = (tmp_path / RESPONSES_DIR).iterdir()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1]


def test_a_start_without_steps_left_removes_no_row_of_later_steps(tmp_path: Path) -> None:
    """It evaluates an earlier checkpoint."""
    start(tmp_path, 1, 0)
    start(tmp_path, 1, 1)
    (tmp_path / METRICS_FILE).write_text('{"step":2}\n')
    files = {file: text for file in tmp_path.rglob("*.jsonl") if (text := file.read_text())}
    own = {"train": {"run_dir": str(tmp_path), "num_steps": 1}, "observe": {"tensorboard": True, "progress": "none"}}
    with closing(metrics_of(tmp_path, 1, 1, **own)) as metrics:
        metrics.start()
    assert all(file.read_text().startswith(text) for file, text in files.items())
    assert {file.name for file in files} == {METRICS_FILE, SAMPLES_FILE, "rank-00000.jsonl"}


@pytest.mark.parametrize("steps_done", [0, 1])
def test_a_start_on_fewer_ranks_repeats_no_step_of_those_that_are_no_more(tmp_path: Path, steps_done: int) -> None:
    for rank in range(2):
        start(tmp_path, 2, 0, rank)
        start(tmp_path, 2, 1, rank)
    start(tmp_path, 1, steps_done, samples=0)
    kept = list(range(steps_done))  # steps that are done, from 0
    phases = {rank: [e["step"] for e in read_events(tmp_path, rank) if e["kind"] == "span"] for rank in range(2)}
    assert phases == {0: [0, 1, 1] if steps_done else [0], 1: kept}
    assert ranks_of(tmp_path) == ([0, 1] if steps_done else [0])
    responses = {file.stem: len(file.read_text().splitlines()) for file in (tmp_path / RESPONSES_DIR).iterdir()}
    assert responses == ({"rank-00000": 2, "rank-00001": 1} if steps_done else {"rank-00000": 1})
    assert len((tmp_path / SAMPLES_FILE).read_text().splitlines()) == steps_done


def test_means_of_drafter_training_are_over_micro_steps_not_over_windows() -> None:
    windows = [
        WindowReport((), 1.0, 0.0, steps, 10 * steps, 0.0, 0.0, metrics={"loss": loss} if steps else {})
        for steps, loss in ((9, 1.0), (1, 6.0), (0, 0.0))
    ]
    first, second, third = (window_metrics(report, True) for report in windows)
    for ranks in ([first, second, third], [reduced([first, third]), second]):
        assert values_of(ranks)["drafter/loss_mean"] == 1.5


def test_speculative_steps_without_a_drafted_token_have_no_accept_rate() -> None:
    row = {f"engine/{name}": 4.0 for name in ("spec_row_steps", "spec_emitted_tokens", "generated_tokens")}
    row |= dict.fromkeys(("engine/spec_drafted_tokens", "engine/spec_accepted_tokens"), 0.0)
    assert _acceptance(row) == {"spec/accept_length": 1.0, "spec/share": 1.0}


@pytest.mark.parametrize(("backend", "counts"), [("embedded", True), ("vllm", False), ("trtllm", False)])
def test_counters_that_an_engine_does_not_have_are_no_columns(tmp_path: Path, backend: str, counts: bool) -> None:
    with closing(metrics_of(tmp_path, rollout={"backend": backend})) as metrics:
        metrics.start()
        metrics.log({}, EngineStats(turns=2), [], [], {})
    (row,) = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert row["engine/turns"] == 2
    assert {name for name in ("preemptions", "prefill_steps") if f"engine/{name}" in row} == (
        {"preemptions", "prefill_steps"} if counts else set()
    )


def test_failures_and_responses_of_groups_that_are_not_trained_on_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def group(prompt_id: int, failure: str | None) -> SampleGroup:
        samples = [Sample(prompt_id, i, [5], [0.0], "a", "stop", 0, failure=failure) for i in range(2)]
        rewards = [RewardResult(float(i), bool(i), failure=failure) for i in range(2)]
        return SampleGroup(Prompt(prompt_id, "q", (1,), ""), samples, rewards)

    kept, dropped = group(0, None), group(1, "no answer in 5 s")
    with closing(metrics_of(tmp_path, env={"kind": "retry"})) as metrics:
        metrics.start()
        metrics.log({"reward/mean": 0.5}, EngineStats(), [kept], [dropped, kept], {})
    (row,), (rollouts,), responses = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in (METRICS_FILE, ROLLOUTS_FILE, f"{RESPONSES_DIR}/rank-00000.jsonl")
    )
    assert (row["reward/failures"], row["env/failures"], row["reward/mean"], rollouts["samples"]) == (2, 2, 0.5, 4)
    assert [(r["prompt_id"], r["sample_index"]) for r in responses] == [(1, 0), (1, 1), (0, 0), (0, 1)]
    assert "2 of 4 trajectories ended without an answer" in caplog.text


def test_rewards_that_teach_nothing_are_logged_by_one_rank_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, sample = Prompt(0, "q", (1,), "2+2?", answer="4"), Sample(0, 0, [5], [0.0], "it is 4", "stop", 0)
    groups = [SampleGroup(prompt, [sample], [RewardResult(0.0, False)])]
    for rank in range(2):
        with closing(metrics_of(tmp_path / str(rank), rank=rank)) as metrics:
            metrics.start()
            for _ in range(4):
                metrics.log({"reward/equal_groups": 1.0}, EngineStats(), groups, groups, {})
    assert [r.message for r in caplog.records if "prompt '2+2?', answer '4', response 'it is 4'" in r.message] != []
    assert len(caplog.records) == 1


def test_the_last_tables_show_a_run_directory_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(metrics_of(Path("[/b][red]:smile:"))) as metrics:
        metrics.start()
        metrics.finish(None)
    assert "[/b][red]:smile:/metrics.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize(("steps_done", "step"), [(0, 1), (2, 3), (4, 4)])
def test_phases_are_of_the_step_under_way_from_1(tmp_path: Path, steps_done: int, step: int) -> None:
    """Before the first step of a start: of that one, if it is not past the last. After it: still of that one."""
    entered: list[int] = []
    with closing(metrics_of(tmp_path, steps_done=steps_done, train={"run_dir": str(tmp_path), "num_steps": 4})) as m:
        setattr(m.world, "enter", lambda _, step: entered.append(step))  # noqa: B010  of a frozen class to mypy
        m.start()
        with m.phase("eval"):
            pass
        if steps_done < 4:
            m.begin_step()
            m.state.step += 1
        with m.phase("checkpoint"):
            pass
    assert entered == [step, step]
    spans = [event["step"] for event in read_events(tmp_path, 0) if event["kind"] == "span"]
    assert spans == [steps_done, steps_done], "events count the steps done before"


@pytest.mark.parametrize(("error", "shown"), [(0.02, "(± 0.020, 1 prompts)"), (float("nan"), "(1 prompts)")])
def test_an_evaluations_line_has_the_standard_error_that_is_known(tmp_path: Path, error: float, shown: str) -> None:
    notes: list[str] = []
    with closing(metrics_of(tmp_path)) as metrics:
        metrics.note = notes.append  # type: ignore[method-assign]
        metrics.log_eval(EvalResult(3, 1, {"1": 1.0}, error, 1.0, 5.0, 5.0, 0.0, 0), 2.0)
    assert [note.partition(", length")[0] for note in notes] == [f"evaluation after step 3: pass@1 1.000 {shown}"]


def test_tokens_that_the_exchange_dropped_are_counted_once_for_all_ranks(tmp_path: Path) -> None:
    report = WindowReport((), 1.0, 0.0, 0, 0, 0.0, 0.0)
    ranks = [metrics_of(tmp_path, 2, rank=rank) for rank in (0, 1)]
    for rank in ranks:
        for dropped in (0, 30, 12):  # windows of one step
            rank.end_window(report, dropped)
    assert values_of([reduced(rank._windows) for rank in ranks])["pre_rollout/dropped_tokens"] == 42
