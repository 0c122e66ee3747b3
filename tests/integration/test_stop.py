"""A signal in any phase: the step is finished or dropped, saved; the next start gets to the same weights."""

import json
import signal
import subprocess
import time

import pytest
import torch

from megatron_tlt.cli.main import main
from tests.helpers.mpi import ROOT, launcher, rank_environment, ranks_of, run_one, run_ranks
from tests.helpers.runs import assert_same_checkpoint, checkpoint_tensors, rows, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

NO_TIME = ["stop.warning_s=10.01", "stop.save_s=10"]  # a hundredth of a second for what is left of the step
DRAFTER = ["rollout.speculation.drafter=eagle", "rollout.speculation.selector=fixed", "idle.train_drafter=true"]
# In the exchange: with a drafter, below. Those of every night take the way of another one of their row.
PHASES = {
    "few": (("rollout", "score"), ("update", "log"), ("update",)),
    "all": (("rollout", "idle", "score", "logprobs"), ("update", "log", "checkpoint"), ("rollout", "update")),
}
LAST = "checkpoints/step-000004"
GRID = ["rollout.tp=2", "actor.cp=2"]  # sums of another order: such jobs are compared with one of their own
ON_GRID = {"whole-grid", "one-engine", "contexts"}


def make_jobs(folder, which):
    """Name: (job, steps that must be saved when it leaves, whether a step is dropped)."""
    before_update, after, with_time = PHASES[which]
    config = str(write_config(folder))
    jobs = {}

    def add(name, at, saved, dropped, *overrides, rank=0, signals=("SIGUSR1",)):
        run = [f"train.run_dir={folder / name}", *overrides]
        job = {"config": config, "overrides": run, "at": at, "rank": rank, "signals": signals}
        jobs[name] = job, saved, dropped

    add("whole", None, 4, False)
    add("whole-grid", None, 4, False, *GRID)
    for rank, phase in enumerate(before_update):
        add(f"no-time-{phase}", [phase, 2], 2, True, *NO_TIME, rank=rank % 2)
    for rank, phase in enumerate(after):
        steps = 3 if phase in ("log", "checkpoint") else 2  # counted before these two
        add(f"no-time-{phase}", [phase, steps], 3, False, *NO_TIME, rank=rank % 2)
    for phase in with_time:
        add(f"time-{phase}", [phase, 2], 3, False, rank=1)
    add("first-evaluation", ["eval", 0], 0, True, *NO_TIME, rank=1)
    add("evaluation", ["eval", 2], 2, True, *NO_TIME)
    add("last-evaluation", ["eval", 4], 4, True, *NO_TIME, rank=1)
    add("at-start", ["weight_sync", 0], 0, False)  # how long a step takes is not known
    add("twice", ["rollout", 2], 2, True, rank=1, signals=("SIGUSR1", "SIGTERM"))
    # Dropped after the window, and no checkpoint of step 2 is there yet: what was trained in it must be undone.
    add("drafter", ["exchange", 2], 2, True, "checkpoint.every=3", *DRAFTER, *NO_TIME)
    add("one-engine", ["rollout", 2], 2, True, *GRID, *NO_TIME, rank=1)
    always = "idle.min_steps_per_window=1"  # one engine has no idle time
    add("contexts", ["update", 2], 3, False, *GRID, *DRAFTER, always, *NO_TIME, rank=1)
    return jobs


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.nightly)])
def ended(request, tmp_path_factory):
    """The folder, the jobs and what came of them, all in one world of two ranks."""
    folder = tmp_path_factory.mktemp("stop")
    jobs = make_jobs(folder, request.param)
    listing, told = folder / "jobs.json", folder / "told.json"
    listing.write_text(json.dumps({name: job for name, (job, _, _) in jobs.items()}))
    run_ranks(2, "tests/integration/workers/stop_ranks.py", str(listing), str(told), timeout=600)
    return folder, jobs, json.loads(told.read_text())


def evaluations(directory):
    return json.loads((directory / "manifest.json").read_text())["extra"]["evaluations"]


def test_a_signal_in_any_phase_saves_what_it_should(ended):
    _, jobs, told = ended
    assert told.keys() == jobs.keys()
    expected = {n: [True, saved, dropped, False] for n, (job, saved, dropped) in jobs.items() if job["at"]}
    assert {name: result for name, result in told.items() if jobs[name][0]["at"]} == expected
    assert told["whole"] == told["whole-grid"] == [False, 4, False]


def test_every_run_gets_to_the_weights_of_an_uninterrupted_one(ended):
    folder, jobs, _ = ended
    first, last = (checkpoint_tensors(folder / f"whole/checkpoints/step-00000{n}") for n in (1, 4))
    assert sum(not torch.equal(first[name], last[name]) for name in first) > 20  # it learns
    assert (folder / "drafter" / LAST / "drafter.safetensors").is_file()
    assert '"cp": 2' in (folder / "contexts" / LAST / "manifest.json").read_text()
    for name in jobs:
        whole = folder / ("whole-grid" if name in ON_GRID else "whole")
        assert_same_checkpoint(whole / LAST, folder / name / LAST)
        assert [row["step"] for row in rows(folder / name)] == [1, 2, 3, 4], name
    _, said = run_one("train", folder / "tiny.yaml", f"train.run_dir={folder / 'whole'}")
    assert "nothing to do" in said
    assert "finished, step 4;" in run_one("status", folder / "whole")[1]


def test_a_dropped_evaluation_is_made_up_for(ended):
    folder, jobs, _ = ended
    whole = evaluations(folder / "whole" / LAST)
    assert [e["step"] for e in whole] == [0, 2, 4]
    for name in jobs.keys() - {*ON_GRID}:
        assert evaluations(folder / name / LAST) == whole, name
    logged = [json.loads(x) for x in (folder / "last-evaluation/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged if "eval/pass@1" in row] == [0, 2, 4]
    _, said = run_one("train", folder / "tiny.yaml", f"train.run_dir={folder / 'last-evaluation'}")
    assert "nothing to do" in said


def start(config, run_dir, *overrides):
    command = [*launcher(2), "-m", "megatron_tlt", "train"]
    command += [str(config), f"train.run_dir={run_dir}", "train.num_steps=500", "eval.every=0", *overrides]
    return subprocess.Popen(
        command, env=rank_environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_the_command_leaves_with_75_when_one_rank_gets_a_signal(ended, tmp_path, capsys):
    folder, _, _ = ended
    job = start(folder / "tiny.yaml", tmp_path / "run")
    metrics = tmp_path / "run/metrics.jsonl"
    while job.poll() is None and not (metrics.exists() and len(rows(tmp_path / "run")) >= 2):
        time.sleep(0.05)
    assert job.poll() is None, job.communicate()[0]
    ranks_of(job)[-1].send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 75, output
    assert "between two steps; saved after step" in output
    steps = len(rows(tmp_path / "run"))
    assert (tmp_path / "run/checkpoints/latest").read_text().strip() == f"step-{steps:06d}"
    assert main(["status", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert f"run: saved, step {steps};" in shown
    assert f"ended by a signal after step {steps} of 500; saved, the same command goes on" in shown
