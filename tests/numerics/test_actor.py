"""The actor: on one rank against transformers and against itself, then the same updates at every layout against one
rank. In one file, as the second half compares with what the first one's run has left.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.helpers.mpi import run_ranks
from tests.helpers.runs import once
from tests.mpi.workers.actor_common import HIDDEN, KINDS, LORA_KINDS, MOE_KINDS, ZERO_ADVANTAGES, results
from tests.numerics.actor_expected import expected_root, one_rank_results


def case(name: str, **match: Any) -> dict[str, Any]:
    return next(
        r for r in one_rank_results() if r["case"] == name and all(r[key] == value for key, value in match.items())
    )


@pytest.mark.parametrize("kind", [*KINDS, *MOE_KINDS])
def test_equals_transformers(kind: str) -> None:
    found = case("parity", kind=kind)
    assert found["same_weights"], "exported tensors must equal the source bit for bit"
    assert all(error <= 1e-4 for error in found["logprobs"].values()), found
    assert found["reference"] <= 1e-4
    assert found["gradients"] <= 1e-5, found
    assert found["loss"] <= 1e-5
    assert found["entropy"] <= 1e-5, "the mean of unmasked tokens"
    assert found["signs_of_life"] >= found["micro_batches"] > 1


def test_replayed_experts_and_the_routers_losses_have_transformers_gradients() -> None:
    found = case("routed")
    assert found["gradients"] <= 1e-5
    metrics = found["metrics"]
    assert metrics["replayed_share"] == pytest.approx(found["known"])
    # Two of eight experts at random are the router's in 1 of 28 cases.
    assert metrics["replay_flips"] == pytest.approx(27 / 28, abs=0.02)
    assert 1 < metrics["expert_load"] < 4 and 0 < metrics["router_entropy"] < math.log(8)


@pytest.mark.parametrize("kind", LORA_KINDS)
def test_adapters_equal_merged_weights_in_transformers(kind: str) -> None:
    """And the reference is the base, and gradients and optimizer hold the factors alone."""
    found = case("lora", kind=kind)
    assert found["weights"] <= 1e-6
    assert found["logprobs"] <= 1e-4 and found["reference"] <= 1e-4
    assert found["gradients"][0] <= 1e-5 and found["loss"] <= 1e-5, found
    assert found["only_factors"] and found["state"] == found["factors"]


@pytest.mark.parametrize("with_adapters", [False, True])
def test_every_parameter_is_on_the_present_device(with_adapters: bool) -> None:
    """Frozen routers, too, which no gradient buffer moves."""
    assert case("devices", with_adapters=with_adapters)["elsewhere"] == []


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
    assert sorted(found["responses"][0]) == list(range(18))


def test_hidden_states_of_a_step_stay_within_their_budget() -> None:
    found = case("hidden_states_budget")
    assert found["full"] and found["same"], "a choice by the responses, not by their order"
    assert found["counted"] == [18, 18, 9]


def test_an_update_waits_for_its_device_as_often_with_more_layers() -> None:
    found = case("syncs")
    for layers in ("local", "engine", "engine, recompute", "engine, activation again"):
        (two, _), (four, _) = found[layers]
        assert two == four, layers
    for again in ("engine, recompute", "engine, activation again"):
        assert [norm for _, norm in found[again]] == [norm for _, norm in found["engine"]], "not the same bits"
    (two, _), (four, _) = found["unfused"]  # what megatron's own RoPE of packed rows would cost
    assert four - two >= 2 * 4


def test_an_update_of_experts_waits_for_its_device_as_often_with_more_layers() -> None:
    found = case("syncs")
    (two, _), (four, _) = found["experts"]
    assert two == four
    (two, _), (four, _) = found["experts, unfused"]
    assert four - two >= 2 * 4
    for (_, fused), (_, unfused) in zip(found["experts"], found["experts, unfused"], strict=True):
        assert fused == pytest.approx(unfused, rel=1e-6)


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


def test_a_step_without_trained_tokens_moves_the_schedule_and_nothing_else() -> None:
    found = case("nothing_trained")
    assert found["untouched"] and found["metrics"] == {"empty_step": 1.0}
    assert found["position"] == 3, "after one mini-batch before, and two without a token"
    assert found["same_metrics"], "an empty mini-batch beside another one is in no mean"


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_weight_decay_skips_norms_and_biases(optimizer: str) -> None:
    found = case("decay", optimizer=optimizer)
    assert found["vectors_untouched"]
    assert found["matrices_decayed"]


def test_bf16_stays_close_and_learns() -> None:
    found = case("bf16")
    assert found["dtypes"] == ["torch.bfloat16"]
    assert found["distance"] < 0.1
    assert found["losses"][-1] < found["losses"][0]
    assert found["rows"] and not any(rows % 128 for rows in found["rows"]), "oneDNN keeps a kernel for each number"


# -- several ranks ----------------------------------------------------------------------------------------------

FEW = {"micro_batch_tokens": 96}  # more micro-batches, and of replicas unequal numbers
SP = {"tp": 2, "sequence_parallel": True}
# Every pair of what an update can be divided by (TP, PP, CP, DP, EP, the optimizer) and of what changes how a rank
# computes it (sequence parallel, recomputation, overlap, few rows) is in one of these.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2, **FEW}),
    "tp2_sp": (2, SP),
    "tp2_sp_ep2": (2, {**SP, "ep": 2}),
    "pp2_recompute": (2, {"pp": 2, "recompute": "full"}),
    "dp2_zero_overlap": (2, {"distributed_optimizer": "on", "overlap": "on", **FEW}),
    "cp2_ep2": (2, {"cp": 2, "ep": 2}),
    "cp2_alone": (2, {"cp": 2, "micro_batch_tokens": 1}),  # a sequence alone: of short responses a rank has no row
    "tp2_pp2_sp_recompute": (4, {**SP, "pp": 2, "recompute": "full"}),
    "pp2_dp2_overlap": (4, {"pp": 2, "overlap": "on", **FEW}),
    "tp2_cp2_sp_selective": (4, {**SP, "cp": 2, "recompute": "selective"}),
    "pp2_cp2_recompute": (4, {"pp": 2, "cp": 2, "recompute": "full"}),
    "tp2_dp2_zero": (4, {"tp": 2, "distributed_optimizer": "on"}),
    "cp2_zero_overlap": (4, {"cp": 2, "distributed_optimizer": "on", "overlap": "on"}),
    "pp2_ep2": (4, {"pp": 2, "ep": 2, "recompute": "selective", "recompute_modules": ["mlp"], **FEW}),
    "tp2_sp_ep4": (4, {**SP, "ep": 4, **FEW}),
}
# SGD shows exactness. Families where the layout is hard on them: tied with biases, untied, norms of queries and keys.
SGD = [("tp2", "qwen2"), ("tp2", "llama"), ("tp2_pp2_sp_recompute", "qwen2"), ("pp2_dp2_overlap", "llama")]
SGD += [("tp2_cp2_sp_selective", "qwen3")]
# Expert gradients with TP > EP, norms with TP = EP, unequal numbers of micro-batches over EP, dense layers between.
SGD += [(name, "qwen3_moe") for name in ("tp2_sp", "tp2_sp_ep4")]
SGD += [(name, "qwen2_moe") for name in ("tp2_sp_ep2", "pp2_ep2")]
ADAM = [(name, "qwen3") for name in ("dp2_zero_overlap", "tp2_dp2_zero", "cp2_zero_overlap")]
ROUTED = [("tp2_sp_ep2", "qwen3_moe"), ("pp2_recompute", "qwen2_moe")]
# Its micro-batches are others, and load balancing is of each micro-batch.
REPLAYED = [("cp2_ep2", "qwen3_moe")]
# Adapters: TP without and with sequence parallel, PP, CP, EP, DP.
LORA = [("tp2", "qwen2"), ("tp2_pp2_sp_recompute", "qwen2"), ("tp2_cp2_sp_selective", "qwen2")]
LORA += [("tp2_sp_ep2", "qwen2_moe"), ("pp2_ep2", "qwen2_moe")]
WHOLE_RESPONSES = [("cp2_alone", "qwen3"), ("pp2_cp2_recompute", "qwen3")]


@once
def run(ranks: int) -> list[dict[str, Any]]:
    one_rank_results()
    variants = ((SGD, "sgd"), (ADAM, "adam"), (WHOLE_RESPONSES, "gspo"), (ROUTED, "routed"), (REPLAYED, "replayed"))
    variants += ((LORA, "lora"),)
    wanted = [(name, kind, variant) for cases, variant in variants for name, kind in cases]
    mine = sorted(case for case in wanted if LAYOUTS[case[0]][0] == ranks)
    triples = json.dumps([[LAYOUTS[name][1], kind, variant] for name, kind, variant in mine])
    return results(run_ranks(ranks, "tests/mpi/workers/actor_parallel.py", str(expected_root()), triples).stdout)


def found(name: str, kind: str, variant: str) -> dict[str, Any]:
    ranks, layout = LAYOUTS[name]
    wanted = {"case": "layout", "kind": kind, "layout": layout, "variant": variant}
    return next(r for r in run(ranks) if wanted.items() <= r.items())


CASES = [(*case, "sgd") for case in SGD] + [(*case, "gspo") for case in WHOLE_RESPONSES]
CASES += [(*case, "replayed") for case in REPLAYED] + [(*case, "lora") for case in LORA]


@pytest.mark.parametrize(("name", "kind", "variant"), CASES)
def test_layout_equals_one_rank(name: str, kind: str, variant: str) -> None:
    outcome = found(name, kind, variant)
    assert outcome["exact"], "exported tensors must equal the source bit for bit"
    assert outcome["logprobs"] <= 1e-4
    for what in ("gradients", "weights", "loss", "grad_norm", "entropy"):
        assert outcome[what] <= 1e-5, (what, outcome)


@pytest.mark.parametrize(("name", "kind"), ROUTED)
def test_replayed_experts_and_the_routers_losses_equal_one_rank(name: str, kind: str) -> None:
    outcome = found(name, kind, "routed")
    for what in ("gradients", "weights", "loss", "grad_norm", "entropy"):
        assert outcome[what] <= 1e-5, (what, outcome)


@pytest.mark.parametrize(("name", "kind"), ADAM)
def test_adam_equals_one_rank(name: str, kind: str) -> None:
    """Looser: Adam divides by sqrt(v), so where a gradient is rounding noise, its sign is the update."""
    outcome = found(name, kind, "adam")
    assert outcome["gradients"] <= 1e-5
    assert outcome["loss"] <= 1e-5
    assert outcome["weights"] <= 2e-4, outcome


@pytest.mark.parametrize("layout", [{"cp": 2}, SP], ids=str)
def test_bf16_stays_close_in_products_of_few_numbers_of_rows(layout: dict[str, Any]) -> None:
    outcome = next(r for r in run(2) if r["case"] == "bf16" and r["layout"] == layout)
    assert outcome["distance"] < 0.1
    assert outcome["rows"] and not any(rows % 128 for rows in outcome["rows"])


@pytest.mark.parametrize("kind", LORA_KINDS)
@pytest.mark.parametrize("variant", ["adam", "lora_adam"])
def test_a_sharded_optimizer_with_overlap_gives_the_same_bits(kind: str, variant: str) -> None:
    wanted = {"case": "overlap", "kind": kind, "variant": variant}
    outcome = next(r for r in run(2) if wanted.items() <= r.items())
    assert outcome["names"] > 10 and outcome["same"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_group_that_sends_is_among_those_that_are_opened_at_the_start(ranks: int) -> None:
    unopened = {str(r["layout"]): r["unopened"] for r in run(ranks) if r["case"] == "layout"}
    assert len(unopened) > 5 and set(unopened.values()) == {0}, unopened


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_skip_what_one_cannot_take(ranks: int) -> None:
    views = next(r for r in run(ranks) if r["case"] == "skip")["views"]
    assert views == [[True, True]] * ranks


@pytest.mark.parametrize(("ranks", "layout", "forward"), [(n, *case) for n in (2, 4) for case in HIDDEN[n]], ids=str)
def test_hidden_states_are_the_engines_and_shared_out(ranks: int, layout: dict[str, Any], forward: str) -> None:
    wanted = {"case": "hidden_states", "layout": layout, "forward": forward}
    outcome = next(r for r in run(ranks) if wanted.items() <= r.items())
    assert outcome["error"] <= 1e-4
    assert outcome["same"], "collecting must not change an update"
    responses = outcome["responses"]
    assert sorted(i for view in responses for i in view) == list(range(18)), "each response with one rank"
    assert all(len(view) >= 18 // ranks - 2 for view in responses)


@pytest.mark.parametrize(("ranks", "name"), [(n, name) for n in (2, 4) for name in ZERO_ADVANTAGES[n]])
def test_responses_without_a_gradient_change_no_update(name: str, ranks: int) -> None:
    """Left out or run through the update: the same gradients, optimizer steps, schedule and policy version."""
    outcome = next(r for r in run(ranks) if r["case"] == "zero_advantages")["outcomes"][name]
    less, whole = outcome["less"], outcome["whole"]
    for mine, theirs in zip(less, whole, strict=True):
        assert theirs["skipped"] == 0 and theirs["tokens"] == theirs["all"] == mine["all"]
        assert mine["tokens"] == mine["all"] - mine["skipped"]
        assert mine["skipped"] > 0
        same = ("version", "position", "steps")
        assert [mine[key] for key in same] == [theirs[key] for key in same]
    assert outcome["same_bits"], "an update of zero gradients moves the weights as Adam and its decay do"
    assert outcome["gradients"] <= 1e-6
