"""Whole runs with everything given back between phases, and with nothing: the same metrics, weights and moments."""

from __future__ import annotations

import json

import pytest
import torch

from tests.helpers.mpi import run_ranks
from tests.helpers.runs import checkpoint_tensors, rows, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

FREED = ["rollout.release_cache=true", "actor.offload_optimizer=true"]
LAYOUTS = {2: ["actor.tp=2", "rollout.tp=2"], 4: ["actor.tp=2", "actor.pp=2", "rollout.tp=2"]}


@pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=pytest.mark.nightly) if n > 2 else n for n in LAYOUTS]
)
def test_giving_memory_back_changes_no_bit(ranks, tmp_path):
    config = str(write_config(tmp_path, train={"num_steps": 2}, eval={"every": 0}, checkpoint={"every": 2}))
    jobs = [
        [config, [f"train.run_dir={tmp_path / name}", *LAYOUTS[ranks], *more]]
        for name, more in (("kept", []), ("freed", FREED))
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    run_ranks(ranks, "tests/integration/workers/train_many.py", str(tmp_path / "jobs.json"))
    kept, freed = rows(tmp_path / "kept"), rows(tmp_path / "freed")
    assert len(kept) == len(freed) == 2
    for a, b in zip(kept, freed, strict=True):
        names = {name for name in a if name.startswith(("policy/", "reward/", "length/", "engine/generated"))}
        assert len(names) > 10 and {n: a[n] for n in names} == {n: b[n] for n in names}
        assert b["memory/rollout_peak_mib"] > 0 and b["memory/update_peak_mib"] > 0
    tensors = [checkpoint_tensors(tmp_path / name / "checkpoints/step-000002") for name in ("kept", "freed")]
    assert tensors[0].keys() == tensors[1].keys() and any("exp_avg" in name for name in tensors[0])
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())
