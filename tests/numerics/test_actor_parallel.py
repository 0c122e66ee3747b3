"""The same updates at every layout: loss, gradients, weights against one rank."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from megatron_tlt.algorithms.build import ALGORITHMS
from tests.helpers.mpi import run_ranks
from tests.mpi.workers.actor_common import KINDS, results
from tests.mpi.workers.actor_layouts import HIDDEN
from tests.numerics.actor_expected import expected_root, one_rank_results

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "dp2": (2, {}),
    "tp2_pp2": (4, {"tp": 2, "pp": 2}),
    "tp2_pp2_sp": (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    "tp4_sp_recompute": (4, {"tp": 4, "sequence_parallel": True, "recompute": "full"}),
    "dp4": (4, {}),
    "pp2_dp2": (4, {"pp": 2}),
    "tp2_dp2_zero": (4, {"tp": 2, "distributed_optimizer": "on"}),
    "tp2_sp_selective": (2, {"tp": 2, "sequence_parallel": True, "recompute": "selective"}),
    "dp2_overlap": (2, {"overlap": "on"}),
    "dp2_zero_overlap": (2, {"distributed_optimizer": "on", "overlap": "on"}),
}
# SGD shows exactness. All families where TP, PP and DP appear first, elsewhere the trickiest (tied, biases).
SGD = [(name, kind) for name in ("tp2", "pp2", "dp2", "tp2_pp2_sp") for kind in KINDS]
SGD += [("dp2_overlap", "qwen2"), ("tp2_sp_selective", "qwen2")]
SGD += [(name, "qwen2") for name in ("tp2_pp2", "tp4_sp_recompute", "dp4", "pp2_dp2")]
ADAM = [("tp2", "qwen3"), ("tp2_pp2_sp", "qwen3"), ("tp2_dp2_zero", "qwen3"), ("dp2_zero_overlap", "qwen3")]


@functools.cache
def run(ranks: int) -> list[dict[str, Any]]:
    one_rank_results()
    wanted = [
        (name, kind, optimizer) for cases, optimizer in ((SGD, "sgd"), (ADAM, "adam")) for name, kind in cases
    ]
    mine = sorted(case for case in wanted if LAYOUTS[case[0]][0] == ranks)
    triples = json.dumps([[LAYOUTS[name][1], kind, optimizer] for name, kind, optimizer in mine])
    return results(
        run_ranks(ranks, "tests/mpi/workers/actor_parallel.py", str(expected_root()), triples).stdout
    )


def found(name: str, kind: str, optimizer: str) -> dict[str, Any]:
    ranks, layout = LAYOUTS[name]
    wanted = {"case": "layout", "kind": kind, "layout": layout, "optimizer": optimizer}
    return next(r for r in run(ranks) if wanted.items() <= r.items())


@pytest.mark.parametrize(("name", "kind"), SGD)
def test_layout_equals_one_rank(name: str, kind: str) -> None:
    outcome = found(name, kind, "sgd")
    assert outcome["exact"], "exported tensors must equal the source bit for bit"
    assert outcome["logprobs"] <= 1e-4
    for what in ("gradients", "weights", "loss", "grad_norm"):
        assert outcome[what] <= 1e-5, (what, outcome)


@pytest.mark.parametrize(("name", "kind"), ADAM)
def test_adam_equals_one_rank(name: str, kind: str) -> None:
    """Looser: Adam divides by sqrt(v), so where a gradient is rounding noise, its sign is the update."""
    outcome = found(name, kind, "adam")
    assert outcome["gradients"] <= 1e-5
    assert outcome["loss"] <= 1e-5
    assert outcome["weights"] <= 2e-4, outcome


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_skip_what_one_cannot_take(ranks: int) -> None:
    views = next(r for r in run(ranks) if r["case"] == "skip")["views"]
    assert views == [[True, True]] * ranks


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize(("ranks", "layout"), [(n, layout) for n in HIDDEN for layout in HIDDEN[n]], ids=str)
def test_hidden_states_are_the_engines_and_shared_out(ranks: int, layout: dict[str, Any], scored: bool) -> None:
    wanted = {"case": "hidden_states", "layout": layout, "scored": scored}
    outcome = next(r for r in run(ranks) if wanted.items() <= r.items())
    assert outcome["error"] <= 1e-4
    assert outcome["same"], "collecting must not change an update"
    answers = outcome["answers"]
    assert sorted(i for view in answers for i in view) == list(range(18)), "each answer with one rank"
    assert all(len(view) >= 18 // ranks - 2 for view in answers)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_answers_without_a_gradient_change_no_update(name: str, ranks: int) -> None:
    """Left out or run through the update: the same gradients, optimizer steps, schedule and policy version."""
    outcome = next(r for r in run(ranks) if r["case"] == "zero_advantages")["outcomes"][name]
    less, whole = outcome["less"], outcome["whole"]
    for mine, theirs in zip(less, whole, strict=True):
        assert theirs["skipped"] == 0 and theirs["tokens"] == theirs["all"] == mine["all"]
        assert mine["tokens"] == mine["all"] - mine["skipped"]
        # REINFORCE++ measures against the mean of the whole batch: equal groups have a gradient.
        assert (mine["skipped"] > 0) == (name != "reinforce_pp")
        same = ("version", "position", "steps")
        assert [mine[key] for key in same] == [theirs[key] for key in same]
    assert outcome["same_bits"], "an update of zero gradients moves the weights as Adam and its decay do"
    assert outcome["gradients"] <= 1e-6
