"""Stop, kill, resume: the weights at step N equal an uninterrupted run's, bit for bit."""

import json

import pytest
import torch

from tests.helpers.mpi import run_ranks
from tests.helpers.runs import assert_same_checkpoint, checkpoint_tensors, rows, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def train_many(folder, jobs, ranks=2):
    listing = folder / "jobs.json"
    listing.write_text(json.dumps(jobs))
    return run_ranks(ranks, "tests/integration/workers/train_many.py", str(listing)).stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of four steps, and one that was stopped after every step."""
    folder = tmp_path_factory.mktemp("resume")
    config = str(write_config(folder))
    stopped = f"train.run_dir={folder / 'stopped'}"
    jobs = [[config, []], *[[config, [stopped, f"train.num_steps={n}"]] for n in (1, 2, 3, 4, 4)]]
    assert train_many(folder, jobs).count("nothing to do") == 1  # the last one finds itself at the end
    return folder


def test_the_run_learns_something(whole):
    """Otherwise equality below would prove nothing."""
    first, last = (checkpoint_tensors(whole / f"run/checkpoints/step-00000{n}") for n in (1, 4))
    changed = [
        name
        for name in first
        if first[name].dtype.is_floating_point and not torch.equal(first[name], last[name])
    ]
    assert len(changed) > 20
    assert all(row["policy/grad_norm"] > 0 for row in rows(whole / "run"))


def test_stopped_after_every_step_equals_uninterrupted(whole):
    for step in (1, 2, 3, 4):
        name = f"checkpoints/step-00000{step}"
        assert_same_checkpoint(whole / "run" / name, whole / "stopped" / name)
    keep = ("reward/mean", "length/mean", "policy/loss", "policy/entropy")
    values = [[{k: row[k] for k in keep} for row in rows(whole / run)] for run in ("run", "stopped")]
    assert values[0] == values[1] and len(values[0]) == 4


def test_a_speculating_run_stopped_and_resumed_equals_a_plain_one(whole):
    """What the selector and the drafter learned comes back from the manifest, and cannot be seen in the weights."""
    config, run_dir = str(whole / "tiny.yaml"), whole / "speculating"
    spec = "rollout.speculation"
    options = [f"train.run_dir={run_dir}", f"{spec}.drafter=suffix", f"{spec}.selector=fixed"]
    train_many(whole, [[config, [*options, f"train.num_steps={n}"]] for n in (2, 4)])
    last = "checkpoints/step-000004"
    assert_same_checkpoint(whole / "run" / last, run_dir / last)
    manifest = json.loads((run_dir / last / "manifest.json").read_text())
    assert manifest["extra"]["engine"]["drafter"] == "suffix"
    assert sum(row["engine/spec_row_steps"] for row in rows(run_dir)) > 0
