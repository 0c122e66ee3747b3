"""The rollout bank: a run killed in the middle of a rollout and resumed is the uninterrupted one, bit for bit."""

import json
import shutil
import stat

import pytest

from tests.helpers.mpi import run_ranks
from tests.helpers.runs import assert_same_checkpoint, rows, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
LAST = "checkpoints/step-000004"
NOW = "checkpoint.asynchronous=false"  # so that a step's checkpoint is there when the next one begins


def train(config, ranks, *overrides):
    return run_ranks(ranks, ["-m", "megatron_tlt"], "train", str(config), *overrides).stdout


def killed(config, run_dir, rank, step, answers, ranks=2, *overrides):
    """A run on `ranks` ranks, of which `rank` dies when it has banked so many answers of `step`."""
    arguments = [str(config), str(rank), str(step), str(answers), f"train.run_dir={run_dir}", *overrides]
    done = run_ranks(ranks, "tests/integration/workers/train_killed.py", *arguments, check=False)
    assert done.returncode != 0, done.stdout
    return run_dir


def banked(run_dir):
    return {row["step"]: row["rollout/banked"] for row in rows(run_dir)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Uninterrupted runs, with and without a bank, and one on a single rank."""
    folder = tmp_path_factory.mktemp("bank")
    config = write_config(folder)
    train(config, 2)
    train(config, 2, f"train.run_dir={folder / 'no_bank'}", "bank.enabled=false")
    train(config, 1, f"train.run_dir={folder / 'one'}")
    return folder


def test_a_bank_changes_nothing_and_leaves_nothing(whole):
    assert_same_checkpoint(whole / "run" / LAST, whole / "no_bank" / LAST)
    assert set(banked(whole / "run").values()) == {0.0}
    assert all("rollout/banked" not in row for row in rows(whole / "no_bank"))
    assert not (whole / "run" / "bank").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_in_a_rollout_resumed_with_and_without_the_bank(whole, tmp_path, rank):
    config = whole / "tiny.yaml"
    run_dir = killed(config, tmp_path / "with", rank, 3, 9, 2, NOW)
    files = sorted((run_dir / "bank").rglob("*.bank"))
    assert {path.parent.name for path in files} == {"step-000003"}  # steps 1 and 2 have a checkpoint
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    for folder in (run_dir, run_dir / "bank", run_dir / "bank/step-000003"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    shutil.copytree(run_dir, tmp_path / "without")
    shutil.rmtree(tmp_path / "without/bank")
    for name in ("with", "without"):
        output = train(config, 2, f"train.run_dir={tmp_path / name}")
        assert "resumed after step 2" in output
        assert_same_checkpoint(whole / "run" / LAST, tmp_path / name / LAST)
        assert not (tmp_path / name / "bank").exists()
        keep = ("reward/mean", "length/mean", "policy/loss", "policy/mismatch_kl")
        resumed, run = (
            [{k: row.get(k) for k in keep} for row in rows(d)] for d in (tmp_path / name, whole / "run")
        )
        assert resumed == run
    with_bank, without = banked(tmp_path / "with"), banked(tmp_path / "without")
    assert 9 <= with_bank[3] <= 32 and with_bank[4] == 0.0
    assert without == dict.fromkeys((1, 2, 3, 4), 0.0)
    tokens = [rows(tmp_path / name)[2]["engine/generated_tokens"] for name in ("with", "without")]
    assert tokens[0] < tokens[1]


def test_resumed_on_another_number_of_ranks(whole, tmp_path):
    """Two ranks begin step 1; one rank finishes the run: the run that one rank makes alone."""
    run_dir = killed(whole / "tiny.yaml", tmp_path / "run", rank=1, step=1, answers=10)
    train(whole / "tiny.yaml", 1, f"train.run_dir={run_dir}")
    assert banked(run_dir)[1] >= 10
    assert_same_checkpoint(whole / "one" / LAST, run_dir / LAST)


def test_one_rank_begins_and_two_resume(whole, tmp_path):
    run_dir = killed(whole / "tiny.yaml", tmp_path / "run", rank=0, step=1, answers=20, ranks=1)
    train(whole / "tiny.yaml", 2, f"train.run_dir={run_dir}")
    assert banked(run_dir)[1] == 20
    assert_same_checkpoint(whole / "run" / LAST, run_dir / LAST)


def test_steps_since_the_last_checkpoint_come_from_the_bank(whole, tmp_path):
    """Checkpoints every 2 steps: step 3 was finished, but its weights are gone; step 4 was under way."""
    sparse = "checkpoint.every=2"
    run_dir = killed(whole / "tiny.yaml", tmp_path / "run", 0, 4, 5, 2, sparse, NOW)
    train(whole / "tiny.yaml", 2, f"train.run_dir={run_dir}", sparse)
    found = banked(run_dir)
    assert found[3] == 32 and 5 <= found[4] < 32
    assert rows(run_dir)[2]["engine/generated_tokens"] == 0
    assert_same_checkpoint(whole / "run" / LAST, run_dir / LAST)


def test_other_sampling_makes_the_bank_stale(whole, tmp_path):
    run_dir = killed(whole / "tiny.yaml", tmp_path / "run", 0, 1, 9)
    train(whole / "tiny.yaml", 2, f"train.run_dir={run_dir}", "rollout.temperature=0.9")
    assert banked(run_dir) == dict.fromkeys((1, 2, 3, 4), 0.0)


def test_a_fresh_start_and_a_torn_bank(whole, tmp_path):
    run_dir = killed(whole / "tiny.yaml", tmp_path / "run", 0, 1, 9)
    shutil.copytree(run_dir, tmp_path / "fresh")
    for path in (run_dir / "bank").rglob("*.bank"):
        path.write_bytes(path.read_bytes()[:-3])
    train(whole / "tiny.yaml", 2, f"train.run_dir={run_dir}")
    assert 8 <= banked(run_dir)[1] < 32
    train(whole / "tiny.yaml", 2, f"train.run_dir={tmp_path / 'fresh'}", "checkpoint.resume=never")
    assert banked(tmp_path / "fresh")[1] == 0.0
    for name in ("run", "fresh"):
        assert_same_checkpoint(whole / "run" / LAST, tmp_path / name / LAST)


def test_block_verification_has_no_bank_and_says_so_once(whole, tmp_path):
    spec = ("rollout.speculation.drafter=suffix", "rollout.speculation.verify=block")
    output = train(whole / "tiny.yaml", 2, f"train.run_dir={tmp_path / 'run'}", "train.num_steps=2", *spec)
    assert output.count("no rollout bank") == 1 and "verify = block" in output
    assert not (tmp_path / "run/bank").exists()
    assert json.loads((tmp_path / "run/config.json").read_text())["bank"]["enabled"] is True


def test_a_tensor_parallel_engine_reads_the_bank_as_one(tmp_path):
    config = write_config(tmp_path, rollout={"samples_per_prompt": 4, "max_tokens": 16, "tp": 2})
    train(config, 2)
    run_dir = killed(config, tmp_path / "killed", 0, 2, 9, 2, NOW)
    train(config, 2, f"train.run_dir={run_dir}")
    assert banked(run_dir)[2] == 9
    assert_same_checkpoint(tmp_path / "run" / LAST, run_dir / LAST)
