"""Faults of disks, checkpoints, rewards and numbers in whole runs. Each ends as docs/guides/on_call.md describes."""

import dataclasses
import io
import json
import os
import pickle
import shutil
import signal
import stat
import subprocess
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from megatron_tlt.actor import checkpoint_files as files
from megatron_tlt.observe.attempt import VARIABLE
from megatron_tlt.resilience.status import read_status
from tests.helpers.mpi import ROOT, fork_command, rank_environment, run_one, start_one
from tests.helpers.runs import FAULTS, assert_same_checkpoint, rows, run_with_fault, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
LAST = "checkpoints/step-000004"
NOW = "checkpoint.asynchronous=false"


def faulty(fault, config, run_dir, *overrides):
    """The output of a run on two ranks in which something goes wrong, and which ends with an error."""
    done = run_with_fault(config, fault, f"train.run_dir={run_dir}", *overrides)
    assert done.returncode in (1, 9), done.stdout  # 9: mpiexec killed a rank that was aborting, too
    assert "Traceback" not in done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of four steps on one rank."""
    folder = tmp_path_factory.mktemp("faults")
    run_one("train", write_config(folder))
    return folder


@pytest.fixture
def train(whole, tmp_path):
    """`megatron-tlt train` into tmp_path/run on one rank: status and output."""

    def run(*overrides, run_dir=tmp_path / "run", check=True):
        return run_one("train", whole / "tiny.yaml", f"train.run_dir={run_dir}", *overrides, check=check)

    return run


@contextmanager
def small_disk(place, kib):
    """A file system of `kib` KiB at `place`; yields a function that gives it another size, writable."""
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs CAP_SYS_ADMIN: run the tests as root")

    def resize(kib):
        subprocess.run(["mount", "-o", f"remount,rw,size={kib}k", str(place)], check=True)

    try:
        yield resize
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def size_kib(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // 1024 + 1


# -- disks --------------------------------------------------------------------------------------------------


def test_a_disk_that_fills_up_during_a_checkpoint(whole, train, tmp_path):
    one = size_kib(whole / "run/checkpoints/step-000001")
    with small_disk(tmp_path / "run", int(2.6 * one)) as resize:
        code, output = train(NOW, check=False)
        assert code == 1, output
        assert "SaveError: cannot write" in output and "No space left on device" in output
        assert "Traceback" not in output
        names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
        assert names == ["latest", "step-000001", "step-000002"]  # the space of the third is given back
        resize(16 * one)
        assert "resumed after step 2" in train()[1]
        assert_same_checkpoint(whole / "run" / LAST, tmp_path / "run" / LAST)


def test_a_disk_that_takes_nothing_from_before_a_checkpoint(whole, train, tmp_path):
    """Of two ranks, the first one cannot write: both end with the reason."""
    one = size_kib(whole / "run/checkpoints/step-000001")
    with small_disk(tmp_path / "run/checkpoints", 16 * one) as resize:
        said = faulty({"read_only": 3}, whole / "tiny.yaml", tmp_path / "run", NOW)
        assert "SaveError: cannot write" in said and "Read-only file system" in said
        assert not list((tmp_path / "run/checkpoints").glob("*.tmp"))
        resize(16 * one)
        assert "resumed after step 2" in train()[1]


def test_a_full_disk_ends_the_rollout_cache_and_not_the_run(whole, train, tmp_path):
    with small_disk(tmp_path / "run/rollout_cache", 4):
        assert "the rollout cache is off" in train()[1]
    assert rows(tmp_path / "run")[-1]["rollout_cache/disabled"] == 1
    assert_same_checkpoint(whole / "run" / LAST, tmp_path / "run" / LAST)


@pytest.mark.parametrize(("most_bytes", "code", "condition"), [(None, 0, "finished"), (65536, 1, "crashed")])
def test_a_full_disk_under_the_log_hides_no_end(whole, tmp_path, most_bytes, code, condition):
    """Both streams go there: the run ends as it would, also with the error of another disk, and notes that."""
    fault = [FAULTS, json.dumps({"most_bytes": most_bytes})] if most_bytes else ["-m", "megatron_tlt"]
    command = [*fork_command(), *fault, "train", str(whole / "tiny.yaml"), f"train.run_dir={tmp_path / 'run'}"]
    environment = rank_environment() | {VARIABLE: str(tmp_path)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=environment, cwd=ROOT, stdout=full, stderr=full, timeout=240, check=False)
    assert (done.returncode, (tmp_path / "exit").read_text()) == (code, f"{code}\n")
    status = read_status(tmp_path / "run")
    assert status.condition == condition
    if code:
        assert "SaveError: cannot write" in status.end.text
    else:
        assert_same_checkpoint(whole / "run" / LAST, tmp_path / "run" / LAST)


# -- checkpoints --------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_written(whole, train, tmp_path):
    train("actor.dtype=bf16", "train.num_steps=1")
    recorded = (tmp_path / "run/config.json").read_bytes()
    for changed, said in (((), "dtype is 'bf16', not 'fp32'"), (("actor.lora.rank=4",), "lora is 'off', not 'rank 4")):
        code, output = train(*changed, check=False)
        assert code == 2 and "does not fit this run: " in output and said in output
        assert "Traceback" not in output
        assert (tmp_path / "run/config.json").read_bytes() == recorded


class Evil:
    """Unpickled, it makes a directory."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def poison_metadata(directory, evil):
    (directory / ".metadata").write_bytes(pickle.dumps(evil))


def poison_common(directory, evil):
    torch.save({"optimizer": evil}, directory / "common.pt")


def poison_extra_state(directory, evil):
    """A layer's extra state, which a load leaves alone: torch's planner would open it without weights_only."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if "_extra_state" in index.fqn)
    buffer = io.BytesIO()
    torch.save(evil, buffer)
    place = metadata.storage_data[index]
    file = directory / place.relative_path
    at = file.stat().st_size
    file.write_bytes(file.read_bytes() + buffer.getvalue())
    metadata.storage_data[index] = dataclasses.replace(place, offset=at, length=len(buffer.getvalue()))
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("poison", [poison_metadata, poison_common, poison_extra_state])
def test_nothing_in_a_checkpoint_is_unpickled(whole, train, tmp_path, poison):
    """Its author also made the manifest, so checksums say nothing."""
    shutil.copytree(whole / "run", tmp_path / "run")
    directory, mark = tmp_path / "run" / LAST, tmp_path / "mark"
    poison(directory, Evil(str(mark)))
    records = {name: files.record_of(directory / name) for name in files.read_manifest(directory).files}
    manifest = dataclasses.replace(files.read_manifest(directory), files=records)
    (directory / files.MANIFEST).write_text(manifest.to_json())
    code, output = train("train.num_steps=5", check=False)
    assert not mark.exists()
    assert "Traceback" not in output
    if poison is poison_extra_state:
        assert code == 0, output
    else:
        assert code == 2, output
        assert "checkpoint.resume = 'auto'" in output


# -- two jobs -----------------------------------------------------------------------------------------------


def test_a_second_job_on_the_run_directory_is_refused_and_the_first_goes_on(whole, train, tmp_path):
    run_dir = tmp_path / "run"
    arguments = (whole / "tiny.yaml", f"train.run_dir={run_dir}")
    long = ("train.num_steps=4000", "checkpoint.keep=2", "eval.every=0")
    first = start_one("train", *arguments, *long)
    try:
        wait_for((run_dir / "checkpoints/latest").exists)
        before = len(rows(run_dir))
        code, output = train(check=False)
        assert code == 1
        assert f"run directory {run_dir} is in use by process {first.pid} on " in output
        assert "Traceback" not in output
        assert "Ranks: 1" in run_one("check", *arguments, "--ranks", 1)[1]
        run_one("export", *arguments, "--out", tmp_path / "exported")
        assert (tmp_path / "exported/config.json").is_file()
        wait_for(lambda: len(rows(run_dir)) > before + 1)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
    done = len(rows(run_dir))  # what no checkpoint covers is cut back and made again
    assert "resumed after step" in train(f"train.num_steps={done + 1}")[1]
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700


def wait_for(condition):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# -- numbers ------------------------------------------------------------------------------------------------


def test_one_update_that_is_not_finite_is_skipped_and_its_batch_kept(whole, tmp_path):
    run_one(FAULTS, '{"nan": [2]}', "train", whole / "tiny.yaml", f"train.run_dir={tmp_path / 'run'}")
    found = rows(tmp_path / "run")
    assert [row["policy/skipped_steps"] for row in found] == [0, 1, 0, 0]
    assert [row["policy/nonfinite_in_a_row"] for row in found] == [0, 1, 0, 0]
    assert found[3]["policy/grad_norm"] > 0
    kept = tmp_path / "run/nonfinite/step-000002"
    arrays = np.load(kept / "rank-00000.npz", allow_pickle=False)
    assert len(arrays["lengths"]) == 32
    assert len(arrays["tokens"]) == arrays["lengths"].sum()
    assert len(arrays["advantages"]) == arrays["response_lens"].sum() < arrays["lengths"].sum()
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["latest", "step-000001", "step-000003", "step-000004"]


def test_too_many_of_them_end_the_run_and_it_resumes_from_before(whole, train, tmp_path):
    limit = "train.max_lost_steps=2"
    said = faulty({"nan": [2, 3, 4]}, whole / "tiny.yaml", tmp_path / "run", limit)
    assert "TrainingError: updates of 2 steps in a row were not finite" in said
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
    kept = tmp_path / "run/nonfinite"
    assert sorted(path.name for path in kept.iterdir()) == ["step-000002", "step-000003"]
    arrays = [np.load(kept / f"step-000003/rank-0000{rank}.npz", allow_pickle=False) for rank in range(2)]
    assert sum(len(a["lengths"]) for a in arrays) == 32
    assert (tmp_path / "run/checkpoints/latest").read_text().strip() == "step-000001"
    _, output = train(limit)
    assert "resumed after step 1" in output
    assert all(row["policy/skipped_steps"] == 0 for row in rows(tmp_path / "run")[1:])


# -- rewards ------------------------------------------------------------------------------------------------


def test_rewards_that_raise_hang_gobble_and_exit_cost_their_samples_unless_they_are_all(tmp_path):
    functions = [{"name": "python", "path": "tests.helpers.rewards:bad"}]
    rewards = {"workers": 2, "timeout_s": 2.0, "functions": functions}
    size = {"num_steps": 1, "prompts_per_step": 12, "run_dir": str(tmp_path / "run")}
    rollout = {"samples_per_prompt": 2, "max_tokens": 8}
    config = write_config(tmp_path, rewards=rewards, train=size, eval={"every": 0}, rollout=rollout)
    text = "".join(json.dumps({"prompt": f"say {i}", "answer": str(i)}) + "\n" for i in range(12))
    (tmp_path / "train.jsonl").write_text(text)
    _, output = run_one("train", config)
    (row,) = rows(tmp_path / "run")
    assert row["reward/failures"] == 16  # of 24 responses: 4 kinds of failure, 2 prompts each, 2 responses each
    assert "16 of 24 rewards failed; one of them" in output
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "say 1", "answer": "1"}) + "\n")
    code, output = run_one("train", config, f"train.run_dir={tmp_path / 'none'}", check=False)
    assert code == 1
    assert "megatron-tlt: step 1: no response of this rollout has a reward" in output, output[-3000:]
    assert not (tmp_path / "none/metrics.jsonl").read_text()
