"""`check`'s estimate of memory against the bytes that PyTorch allocates, on CPU: within 10 %, by phase and part."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.mpi import run_ranks
from tests.mpi.workers.actor_common import results

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

ROLLOUT = ["rollout.max_running_requests=24", "rollout.max_batched_tokens=512"]
SELECTIVE = ["actor.micro_batch_tokens=512", "actor.recompute=selective"]
CASES: dict[int, dict[str, tuple[str, dict[str, Any], list[str]]]] = {
    1: {
        "plain": ("update", {}, ["actor.micro_batch_tokens=512"]),
        "no query norm, long": ("update", {"family": "llama"}, ["actor.micro_batch_tokens=1024"]),
        "half precision": (
            "update",
            {"vocab_size": 512},
            ["actor.micro_batch_tokens=512", "actor.dtype=bf16"],
        ),
        "full recompute": (
            "update",
            {"num_layers": 6},
            ["actor.micro_batch_tokens=512", "actor.recompute=full"],
        ),
        "norms and activation again": ("update", {"intermediate_size": 1024, "num_layers": 6}, SELECTIVE),
        "norms and MLP again, half precision": (
            "update",
            {"vocab_size": 512, "num_layers": 6},
            [*SELECTIVE, "actor.dtype=bf16", "actor.recompute_modules=[layernorm,mlp]"],
        ),
        "rollout": ("rollout", {}, ROLLOUT),
        "rollout, wide MLP": ("rollout", {"intermediate_size": 2048, "vocab_size": 2048}, ROLLOUT),
    },
    2: {
        "tp": ("update", {}, ["actor.micro_batch_tokens=512", "actor.tp=2"]),
        "sp": ("update", {}, ["actor.micro_batch_tokens=512", "actor.tp=2", "actor.sequence_parallel=true"]),
        "pp": ("update", {}, ["actor.micro_batch_tokens=512", "actor.pp=2"]),
        "heads exchanged": ("update", {}, ["actor.micro_batch_tokens=1024", "actor.cp=2"]),
        "keys gathered": (
            "update",
            {"family": "llama", "num_kv_heads": 8},
            ["actor.micro_batch_tokens=1024", "actor.cp=2", "actor.cp_comm_type=all_gather"],
        ),
    },
}


@pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=pytest.mark.nightly) if n == 1 else n for n in CASES]
)
def test_the_estimate_is_within_a_tenth_of_what_is_allocated(ranks, tmp_path):
    arguments = str(tmp_path), json.dumps(list(CASES[ranks].values()))
    found = results(run_ranks(ranks, "tests/mpi/workers/memory_estimate.py", *arguments, timeout=600).stdout)
    assert len(found) == len(CASES[ranks])
    wrong = {}
    for name, result in zip(CASES[ranks], found, strict=True):
        for rank, made in enumerate(result["ranks"]):
            for part, counted in made["counted"].items():
                ratio = made["estimate"][part] / counted
                print(f"{name}, rank {rank}: {part} {counted / 2**20:.1f} MiB, estimate {ratio:.3f} of it")
                if not 0.9 < ratio < 1.1:
                    wrong[name, rank, part] = ratio
    assert not wrong
