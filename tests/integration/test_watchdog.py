"""A rank that dies is named, a job that hangs ends with all stacks, and the next start goes on as if nothing was."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.mpi import ROOT, launcher, rank_environment, run_ranks
from tests.helpers.runs import FAULTS, assert_same_checkpoint, rows, run_with_fault, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
STEPS = 7
LAST = f"checkpoints/step-{STEPS:06d}"
# Rank 0 too: it holds the store and the board.
KILLS = [
    *((1, "rollout", 1), (0, "idle", 1), (1, "score", 2), (0, "exchange", 2), (1, "logprobs", 3)),
    *((0, "update", 3), (1, "merge", 4), (0, "weight_sync", 5), (1, "checkpoint", 6), (0, "eval", 6)),
]


def train(config, run_dir, *overrides):
    """Two ranks without a fault; their output."""
    arguments = ["train", str(config), f"train.run_dir={run_dir}", *overrides]
    return run_ranks(2, ["-m", "megatron_tlt"], *arguments).stdout


def shown(phase, steps_done):
    """The phase with its step, from 1: the step is counted before the phases that follow its last change."""
    return f"phase {phase}, step {steps_done + (phase not in ('log', 'checkpoint', 'eval'))}"


def fault_in(*where):
    """A fault of the worker: rank, phase, steps done, kind."""
    return {"phase": where}


def status(run_dir, *options):
    command = [sys.executable, "-m", "megatron_tlt", "status", str(run_dir), *options]
    return subprocess.run(command, env=rank_environment(), capture_output=True, text=True, cwd=ROOT, timeout=200)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("watchdog")
    config = write_config(folder, train={"num_steps": STEPS}, watchdog={"hang_s": 600}, distributed={"timeout_s": 300})
    train(config, folder / "run")
    return folder


def test_a_run_that_ends_well_leaves_a_finished_status(whole):
    seen = status(whole / "run", "--json")
    found = json.loads(seen.stdout)
    assert (seen.returncode, found["condition"], found["end"]) == (0, "finished", None)
    assert sorted((r["rank"], r["condition"], r["step"]) for r in found["ranks"]) == [
        (0, "done", STEPS),
        (1, "done", STEPS),
    ]
    for folder, mode in (("status", 0o700), ("stacks", 0o700)):
        assert (whole / "run" / folder).stat().st_mode & 0o777 == mode
        for file in (whole / "run" / folder).iterdir():
            assert file.stat().st_mode & 0o777 == (0o700 if file.is_dir() else 0o600), file


@pytest.mark.parametrize("kills", [pytest.param(KILLS, marks=pytest.mark.nightly), KILLS[2:3]], ids=["all", "one"])
def test_a_rank_killed_in_any_phase_is_named_and_a_resumed_run_equals_an_uninterrupted_one(whole, kills):
    """Each start goes on from where the one before was killed."""
    run_dir, config = whole / f"killed-in-{kills[0][1]}-{len(kills)}", whole / "tiny.yaml"
    for rank, phase, step in kills:
        fault = fault_in(rank, phase, step, "SIGKILL")
        done = run_with_fault(config, fault, f"train.run_dir={run_dir}")
        found = [line for line in done.stdout.splitlines() if " (host " in line and "last sign of life" in line]
        assert len(found) == 1, (fault, done.stdout[-3000:])
        assert found[0].startswith(f"megatron-tlt: rank {rank} (host "), (fault, found)
        assert f", in {shown(phase, step)}; last sign of life" in found[0], (fault, found)
        seen = json.loads(status(run_dir, "--json").stdout)
        worst = seen["ranks"][0]
        assert (seen["condition"], worst["rank"], worst["condition"]) == ("crashed", rank, "killed"), seen
        assert f"phase {worst['phase']}, step {worst['step']}" == shown(phase, step)
    assert "resumed after step" in train(config, run_dir)
    assert_same_checkpoint(whole / "run" / LAST, run_dir / LAST)
    assert [row["step"] for row in rows(run_dir)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("kind", "rank", "phase", "frame"),
    [
        # Of waits in an idle window only the watchdog ends one. A stopped process goes on for an instant.
        ("SIGSTOP", 1, "idle", "in _rollout"),
        pytest.param("spin", 0, "update", "in happen", marks=pytest.mark.nightly),
        # It holds the GIL: no thread of the rank could notice.
        pytest.param("regex", 1, "score", "in match", marks=pytest.mark.nightly),
        pytest.param("mpi", 1, "merge", "in happen", marks=pytest.mark.nightly),  # inside MPI
    ],
)
def test_a_job_that_hangs_ends_with_the_stacks_of_all_ranks(whole, kind, rank, phase, frame):
    """Named by its watchdog, or, if others wait for it in a collective, by the collective's timeout."""
    run_dir = whole / f"hangs-{kind}"
    fault = fault_in(rank, phase, 1, kind)
    hang_s = 20 if phase == "idle" else 90
    limits = (f"watchdog.hang_s={hang_s}", "distributed.timeout_s=10")
    started = time.monotonic()
    done = run_with_fault(whole / "tiny.yaml", fault, f"train.run_dir={run_dir}", *limits)
    assert time.monotonic() - started < 20 + 60 + 120, "within a minute after the timeout, and the steps before it"
    end = json.loads(status(run_dir, "--json").stdout)["end"]
    is_timeout = "the job hangs: " not in done.stdout
    where = shown(phase, 1)
    if is_timeout:
        assert f"rank {rank} (still in {where})" in done.stdout or "not arrived: none" in done.stdout, done.stdout
        assert "all ranks write their stacks to" in done.stdout
    else:
        assert f"the job hangs: rank {rank} (host " in done.stdout and f"in {where}" in done.stdout, done.stdout
    assert is_timeout != (phase == "idle") and end["ranks"] == [rank], end
    stacks = [(run_dir / f"stacks/rank-{n}.txt").read_text() for n in range(2)]
    assert all("most recent call first" in text for text in stacks)
    assert frame in stacks[rank] and "loop.py" in stacks[rank] and "Thread 0x" in stacks[rank]
    seen = status(run_dir)
    assert seen.returncode == 1 and f"{run_dir}: hung" in seen.stdout
    table = seen.stdout[seen.stdout.index("rank  host") :].splitlines()
    rows = [row.split() for row in table[1:3]]
    assert [str(rank), "hung", phase] in [[row[0], row[3], row[4]] for row in rows], table


def test_stacks_asked_for_in_a_running_job_change_nothing(whole):
    """By a storm of signals into computing, MPI, gloo and sleeping ranks."""
    run_dir = whole / "asked"
    release = whole / "asked.release"  # until then it is still there
    fault = json.dumps(fault_in(0, "score", 2, str(release)))
    command = [*launcher(2), str(ROOT / FAULTS), fault, "train", str(whole / "tiny.yaml"), f"train.run_dir={run_dir}"]
    env = rank_environment()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=env, cwd=ROOT, **pipes) as job:
        while job.poll() is None and not (run_dir / "metrics.jsonl").exists():
            time.sleep(0.05)
        stormed = 0
        for _ in range(20):
            stormed += send_storm(run_dir)
            time.sleep(0.03)
        release.touch()
        output, _ = job.communicate(timeout=280)
    assert job.returncode == 0, output
    assert stormed > 2
    for rank in range(2):
        text = (run_dir / f"stacks/rank-{rank}.txt").read_text()
        assert "most recent call first" in text
    assert_same_checkpoint(whole / "run" / LAST, run_dir / LAST)


def send_storm(run_dir):
    """SIGQUIT to the ranks, but not to one that has ended its watch: it would die of it as any process does."""
    beats = [json.loads(file.read_text()) for file in (run_dir / "status").glob("rank-*.json")]
    watched = [beat["pid"] for beat in beats if beat["outcome"] == "running" and beat["step"] < STEPS - 2]
    for pid in watched:
        os.kill(pid, signal.SIGQUIT)
    return len(watched)
