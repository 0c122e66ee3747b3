"""Faults of disks, checkpoints, rewards, prompts and numbers in whole runs. Each ends as docs/operations.md says."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest

from tests.helpers.mpi import MPIEXEC, ROOT, rank_environment, run_ranks
from tests.helpers.runs import assert_same_checkpoint, rows, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
LAST = "checkpoints/step-000004"
NOW = "checkpoint.asynchronous=false"


def command(*arguments, ranks=2, check=True):
    return run_ranks(ranks, ["-m", "megatron_tlt"], *map(str, arguments), check=check)


def train(config, run_dir, *overrides, **options):
    return command("train", config, f"train.run_dir={run_dir}", *overrides, **options)


def faulty(fault, config, run_dir, *overrides):
    arguments = [fault, str(config), f"train.run_dir={run_dir}", *overrides]
    return run_ranks(2, "tests/integration/workers/train_faulty.py", *arguments, check=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of four steps."""
    folder = tmp_path_factory.mktemp("faults")
    command("train", write_config(folder))
    return folder


@contextmanager
def small_disk(place, kib):
    """A file system of `kib` KiB at `place`; yields a function that gives it another size, writable."""
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root with CAP_SYS_ADMIN")

    def resize(kib):
        subprocess.run(["mount", "-o", f"remount,rw,size={kib}k", str(place)], check=True)

    try:
        yield resize
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def size_kib(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // 1024 + 1


# -- disks --------------------------------------------------------------------------------------------------


def test_a_disk_that_fills_up_during_a_checkpoint(whole, tmp_path):
    one = size_kib(whole / "run/checkpoints/step-000001")
    with small_disk(tmp_path / "run", int(2.6 * one)) as resize:
        done = train(whole / "tiny.yaml", tmp_path / "run", check=False)
        assert done.returncode == 1, done.stdout
        assert "CheckpointError: cannot" in done.stdout and "No space left on device" in done.stdout
        latest = (tmp_path / "run/checkpoints/latest").read_text().strip()
        assert latest in ("step-000001", "step-000002")
        resize(16 * one)
        done = train(whole / "tiny.yaml", tmp_path / "run")
        assert f"resumed after step {latest[-1]}" in done.stdout
        assert_same_checkpoint(whole / "run" / LAST, tmp_path / "run" / LAST)


def test_a_disk_that_turns_read_only_before_a_checkpoint(whole, tmp_path):
    one = size_kib(whole / "run/checkpoints/step-000001")
    with small_disk(tmp_path / "run/checkpoints", 16 * one) as resize:
        done = faulty("read-only:3", whole / "tiny.yaml", tmp_path / "run", NOW)
        assert done.returncode == 1, done.stdout
        assert "CheckpointError: cannot write" in done.stdout and "Read-only file system" in done.stdout
        assert "Traceback" not in done.stdout
        resize(16 * one)
        assert "resumed after step 2" in train(whole / "tiny.yaml", tmp_path / "run").stdout
        assert_same_checkpoint(whole / "run" / LAST, tmp_path / "run" / LAST)


def test_a_shard_that_cannot_be_written_to_its_end(whole, tmp_path):
    """As a full disk, for those who may not mount: the writer thread's error reaches every rank."""
    done = faulty("small-files", whole / "tiny.yaml", tmp_path / "run")
    assert done.returncode == 1, done.stdout
    assert "CheckpointError: cannot write" in done.stdout and "File too large" in done.stdout
    assert not (tmp_path / "run/checkpoints/latest").exists()
    train(whole / "tiny.yaml", tmp_path / "run")
    assert_same_checkpoint(whole / "run" / LAST, tmp_path / "run" / LAST)


def test_a_full_disk_ends_the_bank_and_not_the_run(whole, tmp_path):
    with small_disk(tmp_path / "run/bank", 4):
        done = train(whole / "tiny.yaml", tmp_path / "run")
        assert "the rollout bank is off" in done.stdout
    assert rows(tmp_path / "run")[-1]["rollout/bank_disabled"] >= 1
    assert_same_checkpoint(whole / "run" / LAST, tmp_path / "run" / LAST)


# -- checkpoints --------------------------------------------------------------------------------------------


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, truncate])
@pytest.mark.parametrize("name", ["*.distcp", "manifest.json", ".metadata"])
def test_a_damaged_newest_checkpoint_is_passed_over(whole, tmp_path, damage, name):
    shutil.copytree(whole / "run", tmp_path / "run")
    damage(next((tmp_path / "run" / LAST).glob(name)))
    done = train(whole / "tiny.yaml", tmp_path / "run")
    assert "REFUSED" in done.stdout and "resumed after step 3" in done.stdout
    assert_same_checkpoint(whole / "run" / LAST, tmp_path / "run" / LAST)


def test_a_checkpoint_of_another_model_is_refused(whole, tmp_path):
    other = write_config(
        tmp_path / "other", actor={"dtype": "bf16"}, train={"num_steps": 1, "prompts_per_step": 8}
    )
    run_dir = tmp_path / "other/foreign"
    train(other, run_dir)
    done = train(whole / "tiny.yaml", run_dir, check=False)
    assert done.returncode == 1
    assert (
        "does not fit this run: dtype is 'bf16', not 'fp32'" in done.stdout and "Traceback" not in done.stdout
    )


# -- two jobs -----------------------------------------------------------------------------------------------


def test_a_second_job_on_the_run_directory_is_refused_and_the_first_goes_on(whole, tmp_path):
    run_dir = tmp_path / "run"
    arguments = [str(whole / "tiny.yaml"), f"train.run_dir={run_dir}"]
    launcher = [str(MPIEXEC), "-n", "2", sys.executable, "-m", "mpi4py", "-m", "megatron_tlt", "train"]
    long = ["train.num_steps=400", "checkpoint.keep=2", "eval.every=0"]
    first = subprocess.Popen(
        [*launcher, *arguments, *long],
        env=rank_environment(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for((run_dir / "checkpoints/latest").exists, first)
        before = len(rows(run_dir))
        second = train(*arguments[:1], run_dir, check=False)
        assert second.returncode == 1
        assert (
            f"run_dir = {run_dir} is in use by process" in second.stdout and "Traceback" not in second.stdout
        )
        assert command("check", *arguments, "--ranks", 2, ranks=1).stdout.count("Ranks: 2") == 1
        command("export", *arguments, "--out", tmp_path / "exported", ranks=1)
        assert (tmp_path / "exported/config.json").is_file()
        wait_for(lambda: len(rows(run_dir)) > before, first)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    done = len(rows(run_dir))  # steps are cut back to the checkpoint that the next run resumes from
    assert "resumed after step" in train(*arguments[:1], run_dir, f"train.num_steps={done + 1}").stdout
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700


def wait_for(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


# -- numbers ------------------------------------------------------------------------------------------------


def test_one_update_that_is_not_finite_is_skipped_and_its_batch_kept(whole, tmp_path):
    done = faulty("nan:2", whole / "tiny.yaml", tmp_path / "run")
    assert done.returncode == 0, done.stdout
    found = rows(tmp_path / "run")
    assert [row["policy/skipped_steps"] for row in found] == [0, 1, 0, 0]
    assert [row["policy/nonfinite_in_a_row"] for row in found] == [0, 1, 0, 0]
    assert found[3]["policy/grad_norm"] > 0
    kept = tmp_path / "run/nonfinite/step-000002"
    arrays = [np.load(kept / f"rank-0000{rank}.npz", allow_pickle=False) for rank in range(2)]
    assert sum(len(a["lengths"]) for a in arrays) == 32
    assert all(len(a["tokens"]) == a["lengths"].sum() for a in arrays)
    assert json.loads((kept / "about.json").read_text())["policy_version"] == 1
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["latest", "step-000001", "step-000003", "step-000004"]


def test_too_many_of_them_end_the_run_and_it_resumes_from_before(whole, tmp_path):
    limit = "train.max_nonfinite_steps=2"
    done = faulty("nan:2,3,4", whole / "tiny.yaml", tmp_path / "run", limit)
    assert done.returncode == 1
    assert "TrainingError: updates of 2 steps in a row were not finite" in done.stdout
    assert "Traceback" not in done.stdout
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
    kept = sorted(path.name for path in (tmp_path / "run/nonfinite").iterdir())
    assert kept == ["step-000002", "step-000003"]
    assert (tmp_path / "run/checkpoints/latest").read_text().strip() == "step-000001"
    train(whole / "tiny.yaml", tmp_path / "run", limit)
    assert_same_checkpoint(whole / "run" / LAST, tmp_path / "run" / LAST)


# -- rewards ------------------------------------------------------------------------------------------------


def test_rewards_that_raise_hang_gobble_and_exit_cost_their_samples_only(tmp_path):
    functions = [{"name": "python", "path": "tests.helpers.bad_rewards:reward"}]
    rewards = {"workers": 2, "timeout_s": 2.0, "functions": functions}
    size = {"num_steps": 1, "prompts_per_step": 12, "run_dir": str(tmp_path / "run")}
    rollout = {"samples_per_prompt": 2, "max_tokens": 8}
    config = write_config(tmp_path, rewards=rewards, train=size, eval={"every": 0}, rollout=rollout)
    text = "".join(json.dumps({"prompt": f"say {i}", "answer": str(i)}) + "\n" for i in range(12))
    (tmp_path / "train.jsonl").write_text(text)
    done = command("train", config)
    (row,) = rows(tmp_path / "run")
    assert row["reward/failures"] == 16  # of 24 answers: 4 kinds of failure, 2 questions each, 2 answers each
    assert "rewards failed; one of them" in done.stdout


# -- prompts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'{"prompt": "a", "answer": "1"}\n{"prompt": ""}\n',
            "train.jsonl:2: field 'prompt' must be a string",
        ),
        (b'{"prompt": "a", "answer": "1"}\n{"prompt": "\xff\xfe"}\n', "train.jsonl:2: not a JSON object"),
        (b'{"prompt": "' + b"long " * 4000 + b'"}\n', "no prompt fits into data.max_prompt_tokens = 64"),
    ],
    ids=["empty", "no UTF-8", "all too long"],
)
def test_prompts_that_cannot_be_used_end_the_run_by_name(tmp_path, content, message):
    config = write_config(tmp_path)
    (tmp_path / "train.jsonl").write_bytes(content)
    done = command("train", config, ranks=1, check=False)
    assert done.returncode in (1, 2)
    assert message in done.stdout and "Traceback" not in done.stdout


def test_ten_thousand_prompts_with_duplicates_and_some_longer_than_the_context(tmp_path):
    config = write_config(
        tmp_path,
        train={"num_steps": 1, "prompts_per_step": 10_000, "run_dir": str(tmp_path / "run")},
        rollout={"samples_per_prompt": 1, "max_tokens": 2, "max_running_requests": 256},
        rewards={"workers": 0, "functions": [{"name": "exact"}]},
        eval={"every": 0},
        observe={"tensorboard": False, "progress": "none", "samples_per_step": 10_000},
    )
    asked = [f"say {i % 100}" if i % 50 else "much too long " * 50 for i in range(10_000)]
    text = "".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in asked)
    (tmp_path / "train.jsonl").write_text(text)
    command("train", config)
    (row,) = rows(tmp_path / "run")
    assert row["rollout/samples"] == 10_000  # the stream goes on into its second epoch
    assert row["reward/failures"] == 0


def test_ten_thousand_prompts_with_duplicates_are_answered_in_order(whole, tmp_path):
    asked = [f"say {i % 100}" for i in range(10_000)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in asked))
    options = [
        "--model",
        whole / "model",
        "--prompts",
        tmp_path / "in.jsonl",
        "--out",
        tmp_path / "out.jsonl",
    ]
    command("generate", *options, "--max-tokens", 4, "--ignore-eos", ranks=1)
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [a["prompt_index"] for a in answers] == list(range(10_000))
    assert (
        len({tuple(a["token_ids"]) for a in answers[::100]}) > 50
    )  # the same question, its own noise each time
