import io
from dataclasses import replace

import pytest
from rich.console import Console

from megatron_tlt.observe import log
from megatron_tlt.observe.progress import TERMINAL_VARIABLE, build_progress, step_line
from megatron_tlt.observe.rollouts import sample_rows
from megatron_tlt.observe.runfiles import read_run
from megatron_tlt.observe.summary import print_summary
from megatron_tlt.types import GenerateCall, Prompt, RewardResult, Sample, SampleGroup, SamplingParams
from tests.helpers.synthetic_run import write_run

METRICS = {
    "time/step": 2.0,
    "engine/tokens_per_s": 200.0,
    "reward/mean": 0.5,
    "reward/accuracy": 0.25,
    "length/mean": 123.4,
    "idle/seconds": 10.0,
    "idle/recovered_seconds": 2.0,
    "pre_rollout/seconds": 7.0,
}


def test_a_log_line_has_rank_step_and_phase(package_logger, capsys):
    log.setup_logging(1, 4, lambda: "phase rollout, step 7")
    logger = package_logger.getChild("test")
    logger.warning("two\nlines")
    logger.info("rank 1 keeps quiet")
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said[9:] == "rank 1/4 phase rollout, step 7 | WARNING two / lines\n"


STEP_3 = (
    "step 3/20  seconds 2.0  tokens/s 200  reward 0.500  accuracy 0.250  length 123  "
    "idle rank-s 10.0  recovered rank-s 2.0  pre-rolled rank-s 7.0\n"
)


def shown(mode, rank=0):
    """What a display of a mode writes into something that is no terminal."""
    stream = io.StringIO()
    display = build_progress(mode, 20, rank, stream)
    display.phase("rollout", 3)
    display._drawn = 0.0
    display.rollout(5, 1, 1000)
    display.step_done(3, METRICS)
    display.close()
    return stream.getvalue()


def test_work_of_known_size_says_what_is_done_and_how_long_the_rest_takes(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("megatron_tlt.observe.progress.time.monotonic", lambda: now[0])
    for mode, wanted in (("plain", "sft: steps done 5/20, 10 a minute, about 1.5 minutes left\n"), ("none", "")):
        stream = io.StringIO()
        display = build_progress(mode, 20, 0, stream)
        for done in range(6):  # a step takes 6 seconds: a line after half a minute
            display.work("sft: steps done", done, 20)
            now[0] += 6
        display.close()
        assert stream.getvalue() == wanted


def test_a_watched_call_counts_finished_responses_and_keeps_its_callbacks(monkeypatch):
    now, stream, called = [100.0], io.StringIO(), []
    monkeypatch.setattr("megatron_tlt.observe.progress.time.monotonic", lambda: now[0])
    call = GenerateCall([], SamplingParams(), on_progress=lambda *counts: called.append(counts))
    call = build_progress("plain", 0, 0, stream).watched(replace(call, on_response=called.append), "eval", 8)
    for _ in range(2):
        call.on_response("sample")
    now[0] += 30
    call.on_progress(3, 1, 500)
    assert stream.getvalue() == "eval 2/8, 4 a minute, about 1.5 minutes left\n"
    assert called == ["sample", "sample", (3, 1, 500)]


def test_a_step_is_a_line_and_a_terminal_has_a_live_one_under_it(monkeypatch):
    assert shown("auto") == shown("plain") == STEP_3
    assert shown("auto", rank=1) == shown("none") == ""
    live = shown("rich")
    assert STEP_3 in live and "step 3/20 rollout: 5 running, 1 waiting, 1000 tokens" in live
    assert "\x1b[?25" not in live, "a rank that is killed could not show the cursor again"
    monkeypatch.setenv(TERMINAL_VARIABLE, "90")
    assert "5 running" in shown("auto") and shown("plain") == STEP_3


@pytest.mark.parametrize(
    ("share", "says"), [(None, ""), (0.04, ""), (0.05, "  truncated 5%"), (1.0, "  truncated 100%")]
)
def test_many_truncated_responses_are_in_the_line(share, says):
    assert step_line(3, 20, {"length/mean": 8.0, "length/truncated": share}) == f"step 3/20  length 8{says}"


def group(index: int, *values: float) -> SampleGroup:
    prompt = Prompt(prompt_id=index, dataset_id=f"d{index}", token_ids=(1,), text="question", answer="4")
    samples = [Sample(index, i, [1, 2], [0.0, 0.0], f"response {i}", "stop", 3) for i in range(len(values))]
    return SampleGroup(prompt, samples, [RewardResult(v, v > 0.5) for v in values])


def test_samples_show_the_best_and_the_worst_response():
    groups = [group(0, 0.2, 1.0, 0.1), group(1, 0.0), group(2, 1.0, 0.0)]
    rows = sample_rows(groups, 3, lambda sample: {"runs": []} if sample.sample_index == 2 else None)
    found = [(r["prompt_id"], r["sample_index"], r["reward"], "drafts" in r) for r in rows]
    assert found == [(0, 1, 1.0, False), (0, 2, 0.1, True), (1, 0, 0.0, False)]
    assert rows[0]["response"] == "response 1"


def test_the_summary_shows_what_was_learned_and_where_the_time_went(tmp_path):
    stream, run = io.StringIO(), read_run(write_run(tmp_path / "r", steps=4))
    print_summary(run, {"checkpoint": tmp_path / "step-4"}, Console(file=stream, width=200))
    text = stream.getvalue()
    parts = ("other", "4 / 4", "0.700  ± 0.020, from 0.500 ± 0.020", "; 40,000 tokens", "70%", "; 160 steps", "step-4")
    assert [part for part in parts if part not in text] == []
