"""Whole runs with everything given back between phases, and with nothing: the same metrics, weights and moments."""

from __future__ import annotations

import pytest

from tests.helpers.runs import assert_same_checkpoint, rows, train_many, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.ci]

FREED = ["rollout.release_cache=true", "actor.offload_optimizer=true"]
LAYOUTS = {"tp": ["actor.tp=2", "rollout.tp=2"], "pp": ["actor.pp=2", "actor.dtype=bf16"]}


def test_giving_memory_back_changes_no_bit(tmp_path):
    config = write_config(tmp_path, train={"num_steps": 2}, eval={"every": 0}, checkpoint={"every": 2})
    kinds = {"kept": [], "freed": FREED}
    train_many(config, {f"{n}/{layout}": [*o, *more] for layout, o in LAYOUTS.items() for n, more in kinds.items()})
    for layout in LAYOUTS:
        kept, freed = (tmp_path / name / layout for name in ("kept", "freed"))
        assert len(rows(kept)) == len(rows(freed)) == 2
        for a, b in zip(rows(kept), rows(freed), strict=True):
            names = {name for name in a if name.startswith(("policy/", "reward/", "length/", "engine/generated"))}
            assert len(names) > 10 and {n: a[n] for n in names} == {n: b[n] for n in names}
            assert b["memory/rollout_peak_mib"] > 0 and b["memory/update_peak_mib"] > 0
        assert_same_checkpoint(*(run / "checkpoints/step-000002" for run in (kept, freed)))
