from dataclasses import replace

import pytest

from megatron_tlt.config.drafter_kinds import DRAFTERS
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.sim import SimCostSection
from megatron_tlt.sim.cluster import Cluster
from megatron_tlt.sim.cost_model import GPUS, Roofline, build_costs, cache_tokens, kv_bytes
from tests.helpers.sim import MODEL, sim_config

SHAPE = ArchitectureConfig.model_validate(MODEL)
BARE = SimCostSection(bandwidth_efficiency=1.0, compute_efficiency=1.0, step_ms=0, allreduce_us=0)


def test_one_request_is_bound_by_reading_the_weights():
    # 28 layers of attention (3584 x 4608 and back) and MLP, and the head; worked out by hand
    layer = 3584 * 128 * 2 * (28 + 4) + 3 * 3584 * 18944 + 2 * 3584
    weights = 28 * layer + 152064 * 3584
    seconds = Roofline(SHAPE, GPUS["h100"], 1, BARE).step(1, 1, 0.0, False)
    assert seconds == pytest.approx(2 * weights / 3.35e12, rel=0.001)


def test_contexts_cost_their_bytes():
    assert kv_bytes(SHAPE) == 2 * 28 * 4 * 128 * 2
    costs = Roofline(SHAPE, GPUS["h100"], 1, BARE)
    more = costs.step(8, 8, 1e6, False) - costs.step(8, 8, 0.0, False)
    assert more == pytest.approx(1e6 * kv_bytes(SHAPE) / 3.35e12, rel=0.03)


def test_tensor_parallel_divides_reading_and_adds_reduces():
    one, four = (Roofline(SHAPE, GPUS["h100"], tp, BARE) for tp in (1, 4))
    assert four.step(1, 1, 0, False) == pytest.approx(one.step(1, 1, 0, False) / 4, rel=0.01)
    late = Roofline(SHAPE, GPUS["h100"], 4, BARE.model_copy(update={"allreduce_us": 10.0}))
    assert late.step(1, 1, 0, False) - four.step(1, 1, 0, False) == pytest.approx(2 * 28 * 10e-6)


def test_drafting_costs_its_passes_and_lookups():
    costs = Roofline(SHAPE, GPUS["h100"], 1, SimCostSection(lookup_us=20))
    one, eight = (costs.draft("eagle", 4, length) for length in (1, 8))
    assert eight == pytest.approx(8 * one)
    assert costs.draft("suffix", 10, 8) == pytest.approx(200e-6)
    assert costs.step(1, 4, 0, True) - costs.step(1, 4, 0, False) == pytest.approx(3e-3)


def test_a_block_is_one_pass_of_its_rows_whatever_is_used_of_it():
    """Worked out by hand: a published drafter of 5 layers and a Markov head of rank 256, against EAGLE-3's passes."""
    block = replace(DRAFTERS["dspark"], layers_read=5, cached_layers=5, block_size=7, rank=256)
    bare = BARE.model_copy(update={"pass_ms": 0})
    costs = Roofline(SHAPE, GPUS["h100"], 1, bare, block)
    layer = 3584 * 128 * 2 * (28 + 4) + 3 * 3584 * 18944 + 2 * 3584
    read = 5 * layer + 5 * 3584**2 + 152064 * 3584 + 7 * 152064 * 256
    one, seven = (costs.draft("trained", 1, length) for length in (1, 7))
    assert one == seven == pytest.approx(2 * read / 3.35e12, rel=0.001)
    selected = Roofline(SHAPE, GPUS["h100"], 1, bare, replace(block, has_selector=True))
    read += 5 * (8 * 3584 + 3584**2 // 2) + 256 * 3584 - 7 * (152064 - 16) * 256
    assert selected.draft("trained", 1, 7) == pytest.approx(2 * read / 3.35e12, rel=0.001)
    eagle3 = Roofline(SHAPE, GPUS["h100"], 1, bare, DRAFTERS["eagle3"], 32000)
    read = layer + 3 * 3584**2 + 3584 * 128 * (28 + 8) + 32000 * 3584
    assert eagle3.draft("trained", 1, 3) == pytest.approx(3 * 2 * read / 3.35e12, rel=0.001)
    assert costs.draft("trained", 256, 7) > 2 * seven, "7 x 256 rows are computed"


def test_the_cache_takes_what_the_weights_leave():
    small, large = (cache_tokens(sim_config(f"rollout.tp={tp}")) for tp in (1, 2))
    assert 500_000 < small < large
    weights = 2 * 7.6e9
    assert small == pytest.approx((80e9 * 0.85 - weights) / kv_bytes(SHAPE), rel=0.01)
    assert cache_tokens(sim_config("rollout.kv_cache_mib=1024")) == 2**30 // kv_bytes(SHAPE)


def test_a_drafter_s_directory_says_how_many_tokens_it_drafts(tmp_path):
    (tmp_path / "config.json").write_text('{"draft_vocab_size": 32000}')
    at = "rollout.speculation"
    eagle3 = f"{at}.drafter=eagle3", f"{at}.drafter_path={tmp_path}"
    found, given = sim_config(*eagle3), sim_config(*eagle3, f"{at}.draft_vocab_size=32000")
    assert build_costs(found).draft("trained", 1, 3) == build_costs(given).draft("trained", 1, 3)
    assert Cluster(found).micro_step() == Cluster(given).micro_step()
    (tmp_path / "config.json").write_text("{}")
    assert build_costs(found).draft("trained", 1, 3) > build_costs(given).draft("trained", 1, 3), "all are drafted"
