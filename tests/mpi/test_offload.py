"""Optimizer state on the host between updates, on real ranks: same bits, and the device's memory is really free."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.mpi import run_ranks
from tests.mpi.workers.actor_common import results
from tests.numerics.actor_expected import models_root

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"sgd": True}],
    2: [{"pp": 2, "dtype": "bf16"}, {"dtype": "bf16", "distributed_optimizer": "on"}],
    4: [{"tp": 2, "pp": 2, "sequence_parallel": True}],
}


@pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=pytest.mark.nightly) if n > 2 else n for n in LAYOUTS]
)
def test_offload_changes_no_bit_and_frees_the_memory(ranks, tmp_path):
    arguments = str(models_root()), str(tmp_path), json.dumps(LAYOUTS[ranks])
    found = results(run_ranks(ranks, "tests/mpi/workers/offload.py", *arguments).stdout)
    assert [r["layout"] for r in found] == LAYOUTS[ranks]
    for result in found:
        assert all(result["same"].values()), result
        for on, off in zip(result["on"], result["off"], strict=True):  # every rank
            assert all(at == {"state": 0, "gradients": 0} for at in on), result["layout"]
            assert all(at["gradients"] > 0 for at in off)
            has_state = not result["layout"].get("sgd")
            assert (off[-1]["state"] > 0) == has_state
