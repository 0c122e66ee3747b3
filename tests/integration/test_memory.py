"""Whole runs with everything given back between phases, and with nothing: the same metrics, weights and moments."""

from __future__ import annotations

import json

import pytest

from tests.helpers.mpi import run_ranks
from tests.helpers.runs import assert_same_checkpoint, rows, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

FREED = ["rollout.release_cache=true", "actor.offload_optimizer=true"]
LAYOUTS = {
    "tp": ["actor.tp=2", "rollout.tp=2"],
    "pp": ["actor.pp=2", "actor.dtype=bf16"],
}


def test_giving_memory_back_changes_no_bit(tmp_path):
    config = str(write_config(tmp_path, train={"num_steps": 2}, eval={"every": 0}, checkpoint={"every": 2}))
    jobs = [
        [config, [f"train.run_dir={tmp_path / name / layout}", *LAYOUTS[layout], *more]]
        for layout in LAYOUTS
        for name, more in (("kept", []), ("freed", FREED))
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    run_ranks(2, "tests/integration/workers/train_many.py", str(tmp_path / "jobs.json"))
    for layout in LAYOUTS:
        kept, freed = (tmp_path / name / layout for name in ("kept", "freed"))
        assert len(rows(kept)) == len(rows(freed)) == 2
        for a, b in zip(rows(kept), rows(freed), strict=True):
            names = {name for name in a if name.startswith(("policy/", "reward/", "length/", "engine/generated"))}
            assert len(names) > 10 and {n: a[n] for n in names} == {n: b[n] for n in names}
            assert b["memory/rollout_peak_mib"] > 0 and b["memory/update_peak_mib"] > 0
        assert_same_checkpoint(*(run / "checkpoints/step-000002" for run in (kept, freed)))
