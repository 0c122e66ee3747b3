"""The actor on one rank against transformers and against itself."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.helpers.mpi import ROOT, run_ranks
from tests.mpi.workers.actor_common import KINDS, MOE_KINDS, results
from tests.mpi.workers.actor_layouts import HIDDEN
from tests.numerics.actor_expected import one_rank_results


def case(name: str, **match: Any) -> dict[str, Any]:
    return next(
        r
        for r in one_rank_results()
        if r["case"] == name and all(r[key] == value for key, value in match.items())
    )


@pytest.mark.parametrize("kind", [*KINDS, *MOE_KINDS])
def test_equals_transformers(kind: str) -> None:
    found = case("parity", kind=kind)
    assert found["same_weights"], "exported tensors must equal the source bit for bit"
    assert all(error <= 1e-4 for error in found["logprobs"].values()), found
    assert found["reference"] <= 1e-4
    assert found["gradients"] <= 1e-5, found
    assert found["loss"] <= 1e-5


def test_replayed_experts_and_the_routers_losses_have_transformers_gradients() -> None:
    found = case("routed")
    assert found["gradients"] <= 1e-5
    metrics = found["metrics"]
    assert metrics["replayed_share"] == pytest.approx(found["known"])
    assert metrics["unreplayed_mismatch_abs"] <= 1e-5
    # Two of eight experts at random are the router's in 1 of 28 cases.
    assert metrics["replay_flips"] == pytest.approx(27 / 28, abs=0.02)
    assert 1 < metrics["expert_load"] < 4 and 0 < metrics["router_entropy"] < math.log(8)


def test_packing_changes_nothing() -> None:
    found = case("packing")
    assert found["micro_batches"]["one"] == 18
    assert 1 < found["micro_batches"]["some"] < 18
    assert found["micro_batches"]["all"] == 1
    assert found["some"] <= 1e-5
    assert found["all"] <= 1e-5
    assert found["recompute_same_bits"]


@pytest.mark.parametrize(("layout", "forward"), HIDDEN[1], ids=str)
def test_its_hidden_states_are_the_engines(layout: dict[str, Any], forward: str) -> None:
    found = case("hidden_states", layout=layout, forward=forward)
    assert found["error"] <= 1e-4
    assert found["same"], "collecting must not change an update"
    assert sorted(found["answers"][0]) == list(range(18))


def test_hidden_states_of_a_step_stay_within_their_budget() -> None:
    found = case("hidden_states_budget")
    assert found["full"] and found["same"], "a choice by the answers, not by their order"
    assert found["counted"] == [18, 18, 9]


@pytest.mark.nightly
def test_drafters_trained_on_either_source_draft_alike() -> None:
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    (found,) = results(run_ranks(1, "tests/mpi/workers/actor_replay.py", env=path).stdout)
    assert found["engine"] > 3 * found["start"]
    assert found["actor"] == pytest.approx(found["engine"], rel=0.02)


def test_an_update_waits_for_its_device_as_often_with_more_layers() -> None:
    found = case("syncs")
    for layers in ("local", "engine", "engine, recompute", "engine, activation again"):
        (two, _), (four, _) = found[layers]
        assert two == four, layers
    for again in ("engine, recompute", "engine, activation again"):
        assert [norm for _, norm in found[again]] == [norm for _, norm in found["engine"]], "not the same bits"
    (two, _), (four, _) = found["unfused"]  # what megatron's own RoPE of packed rows would cost
    assert four - two >= 2 * 4


def test_non_finite_gradients_are_refused() -> None:
    found = case("guards")
    assert found["skipped"]
    assert found["untouched"]
    assert found["version"] == 0
    assert found["skipped_steps"] == 1


def test_gradients_are_clipped() -> None:
    found = case("guards")
    assert found["grad_norm"] > 1
    assert found["norm_after_clip"] == pytest.approx(1e-3, rel=1e-4)
    assert found["moved"] == pytest.approx(0.05 * 1e-3, rel=1e-2)  # one SGD step: learning rate times norm


def test_a_step_without_trained_tokens_leaves_everything() -> None:
    assert case("nothing_trained")["untouched"]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_weight_decay_skips_norms_and_biases(optimizer: str) -> None:
    found = case("decay", optimizer=optimizer)
    assert found["vectors_untouched"]
    assert found["matrices_decayed"]


def test_random_init_depends_on_the_seed_only() -> None:
    found = case("guards")
    assert found["random_same"]
    assert found["random_other"]


def test_bf16_stays_close_and_learns() -> None:
    found = case("bf16")
    assert found["dtypes"] == ["torch.bfloat16"]
    assert found["distance"] < 0.1
    assert found["losses"][-1] < found["losses"][0]
