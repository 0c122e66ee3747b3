"""The rollout cache: a run killed in the middle of a rollout and resumed is the uninterrupted one, bit for bit."""

import json
import shutil
import signal
import stat

import pytest
from make_demo_policy import write_experts

from tests.helpers.mpi import run_one, run_ranks
from tests.helpers.runs import FAULTS, TLT_ON, assert_same_checkpoint, copy_run, rows, run_with_fault, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.ci]
LAST = "checkpoints/step-000004"
NOW = "checkpoint.asynchronous=false"  # so that a step's checkpoint is there when the next one begins


def train(config, ranks, *overrides):
    return run_ranks(ranks, ["-m", "megatron_tlt"], "train", str(config), *overrides).stdout


def killed(config, run_dir, rank, step, responses, *overrides):
    """A run on two ranks, of which `rank` dies when it has cached so many responses of `step`."""
    run_with_fault(config, {"cached": [rank, step, responses]}, f"train.run_dir={run_dir}", *overrides)
    return run_dir


def reused(run_dir):
    return {row["step"]: row["rollout_cache/reused"] for row in rows(run_dir)}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """An uninterrupted run on one rank."""
    folder = tmp_path_factory.mktemp("one")
    run_one("train", write_config(folder))
    return folder


@pytest.fixture
def resumed(one):
    """Resumes a run on one rank; returns its output."""

    def resume(run_dir, *overrides):
        return run_one("train", one / "tiny.yaml", f"train.run_dir={run_dir}", *overrides)[1]

    return resume


@pytest.fixture
def dead(one, tmp_path):
    """A run on one rank that died when it had cached so many responses of a step."""

    def die(step, responses, *overrides):
        run_dir = tmp_path / "run"
        fault = json.dumps({"cached": [0, step, responses]})
        arguments = (fault, "train", one / "tiny.yaml", f"train.run_dir={run_dir}", *overrides)
        code, output = run_one(FAULTS, *arguments, check=False)
        assert code == -signal.SIGKILL, output
        return run_dir

    return die


def test_killed_in_a_rollout_resumed_with_and_without_the_cache(one, dead, resumed, tmp_path):
    run_dir = dead(3, 9, NOW)
    (file,) = (run_dir / "rollout_cache").rglob("*.jsonl")
    assert file.parent.name == "step-000003"  # steps 1 and 2 have a checkpoint
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for folder in (run_dir, run_dir / "rollout_cache", file.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    without = copy_run(run_dir, tmp_path / "without")
    shutil.rmtree(without / "rollout_cache")
    (without / "lock").unlink()
    for folder, enabled in ((run_dir, "true"), (without, "false")):
        assert "resumed after step 2" in resumed(folder, f"rollout_cache.enabled={enabled}")
        assert_same_checkpoint(one / "run" / LAST, folder / LAST)
        assert not (folder / "rollout_cache").exists()
        keep = ("reward/mean", "length/mean", "policy/loss", "policy/mismatch_k3")
        values = [[{k: row.get(k) for k in keep} for row in rows(d)] for d in (folder, one / "run")]
        assert values[0] == values[1]
    assert reused(run_dir) == {1: 0, 2: 0, 3: 9, 4: 0}
    assert all("rollout_cache/reused" not in row for row in rows(without)[2:])
    assert set(reused(one / "run").values()) == {0.0} and not (one / "run" / "rollout_cache").exists()
    tokens = [rows(folder)[2]["engine/generated_tokens"] for folder in (run_dir, without)]
    assert tokens[0] < tokens[1]


def test_killed_twice_in_a_step_after_one_that_has_no_checkpoint(one, dead, resumed):
    """Checkpoints every 2 steps: step 3 was finished, but its weights are gone; step 4 was under way."""
    for responses in (5, 6):
        run_dir = dead(4, responses, NOW, "checkpoint.every=2")
    resumed(run_dir, "checkpoint.every=2")
    assert reused(run_dir) == {1: 0, 2: 0, 3: 32, 4: 11}
    assert rows(run_dir)[2]["engine/generated_tokens"] == 0
    assert_same_checkpoint(one / "run" / LAST, run_dir / LAST)


def test_killed_with_experts_that_are_replayed(one, dead, resumed, tmp_path):
    """Cached responses come with the experts of their tokens."""
    write_experts(one / "model", one / "experts", seed=0)
    changed = [f"model.path={one / 'experts'}", "actor.router_replay=rollout", "train.num_steps=3"]
    changed += ["rollout.speculation.drafter=eagle", "idle.train_drafter=true", "idle.min_steps_per_window=2"]
    resumed(tmp_path / "whole", *changed)
    run_dir = dead(2, 9, NOW, *changed)
    assert "resumed after step 1" in resumed(run_dir, *changed)
    assert reused(run_dir) == {1: 0, 2: 9, 3: 0}
    assert all((row["policy/replayed_share"], row["policy/replay_flips"]) == (1, 0) for row in rows(run_dir))
    assert_same_checkpoint(*(folder / "checkpoints/step-000003" for folder in (tmp_path / "whole", run_dir)))


@pytest.mark.nightly
def test_two_ranks_and_one_read_what_the_other_has_cached(one, dead, tmp_path):
    """Step 1 is begun by two ranks and finished by one, and the other way round."""
    config, two = one / "tiny.yaml", tmp_path / "two"
    train(config, 2, f"train.run_dir={two}")
    by_two = killed(config, tmp_path / "by_two", 1, 1, 10)
    run_one("train", config, f"train.run_dir={by_two}")
    assert reused(by_two)[1] >= 10
    assert_same_checkpoint(one / "run" / LAST, by_two / LAST)
    by_one = dead(1, 20)
    train(config, 2, f"train.run_dir={by_one}")
    assert reused(by_one)[1] == 20
    assert_same_checkpoint(two / LAST, by_one / LAST)
    # Either rank may fetch the prompts of which the other one has cached responses.
    pulling = "rollout.max_running_requests=4"
    again = killed(config, tmp_path / "again", 0, 3, 9, NOW, pulling)
    train(config, 2, f"train.run_dir={again}", pulling)
    assert 9 <= reused(again)[3] < 32
    assert_same_checkpoint(two / LAST, again / LAST)


ON_TWO = {
    "contexts": ["actor.cp=2"],
    "experts": ["actor.ep=2", "actor.router_replay=rollout"],
    "experts in one engine": ["actor.ep=2", "actor.router_replay=rollout", "rollout.tp=2"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ON_TWO)
def test_killed_with_the_drafter_trained_equals_a_whole_run_without_one(tmp_path, name):
    """Context and expert parallel actors: TLT on, killed in a rollout and resumed, against TLT off."""
    steps = {"num_steps": 3, "prompts_per_step": 8}
    config = write_config(tmp_path, train=steps, eval={"every": 0})
    changed, last = [*ON_TWO[name]], "checkpoints/step-000003"
    if "experts" in name:
        write_experts(tmp_path / "model", tmp_path / "experts", seed=0)
        changed.append(f"model.path={tmp_path / 'experts'}")
    train(config, 2, f"train.run_dir={tmp_path / 'off'}", *changed)
    run_dir = killed(config, tmp_path / "killed", 0, 2, 9, NOW, *changed, *TLT_ON)
    train(config, 2, f"train.run_dir={run_dir}", *changed, *TLT_ON)
    assert 9 <= reused(run_dir)[2] < 32
    assert_same_checkpoint(tmp_path / "off" / last, run_dir / last)
    found = rows(run_dir)
    assert all(row["drafter/steps"] > 0 and row["engine/spec_row_steps"] > 0 for row in found)
    if "experts" in name:
        assert all((row["policy/replayed_share"], row["policy/replay_flips"]) == (1, 0) for row in found)
