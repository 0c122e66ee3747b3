"""Checkpoints of the actor: resume bit for bit, other layouts, another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.mpi import run_ranks
from tests.mpi.workers.actor_common import results
from tests.numerics.actor_expected import models_root

pytestmark = pytest.mark.ci

WORKER = "tests/mpi/workers/actor_checkpoint.py"


def launch(ranks: int, *commands: str) -> list[dict[str, Any]]:
    """One launch for several commands of the worker."""
    return results(run_ranks(ranks, WORKER, str(models_root()), " + ".join(commands)).stdout)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def one_rank(place: Path) -> list[dict[str, Any]]:
    commands = [f"{verb} {place}/{name} {layout}" for name, layout in VARIANTS.items() for verb in ("save", "load")]
    return launch(1, *commands, f"refuse {place}/adam", f'frozen {place}/frozen {{"model":"llama"}}')


VARIANTS = {"adam": "{}", "sgd": '{"sgd":true}', "bf16": '{"dtype":"bf16"}'}
SHARDED = '{"tp":2,"distributed_optimizer":"on"}'
FOUR = ['{"tp":2,"pp":2}', '{"tp":4,"sequence_parallel":true}', '{"tp":2,"cp":2}']


@pytest.fixture(scope="module")
def four_ranks(place: Path, one_rank: list[dict[str, Any]], two_ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return launch(
        4,
        f"save {place}/four {FOUR[0]}",
        *(f"load {place}/four {layout}" for layout in FOUR),
        f'load {place}/adam {{"tp":2}}',
        f"save {place}/zero {SHARDED}",
        f"load {place}/zero {SHARDED}",
        f'load {place}/zero {{"distributed_optimizer":"on"}}',
        f'load {place}/mixed {SHARED},"pp":2}}',
        f"full {place}/full {FOUR[0]}",
        f'save {place}/lora {{"tp":2,"pp":2,{LORA}}}',
        f'load {place}/lora {{"tp":2,"pp":2,{LORA}}}',
        f'load {place}/lora {{"tp":2,"cp":2,{LORA}}}',
    )


ZERO = '{"dtype":"bf16","distributed_optimizer":"on"}'
DIVIDED = '{"cp":2,"distributed_optimizer":"on"}'
HOST = '{"dtype":"bf16","distributed_optimizer":"on","offload_optimizer":true}'


LORA = '"lora":{"rank":4}'
# No other weight is trained.
OF_EXPERTS = '{"model":"qwen3_moe","ep":2,"offload_optimizer":true,"lora":{"rank":4,"targets":["up_proj","down_proj"]}}'
SHARED, EVERY = '{"model":"qwen2_moe","ep":2', '{"model":"qwen3_moe","ep":2,"tp":2,"sequence_parallel":true'
EXPERTS = [
    ("mixed", "save", SHARED + "}"),  # a dense layer between: another form of keys
    ("mixed", "load", SHARED + "}"),
    ("mixed", "load", '{"model":"qwen2_moe","pp":2}'),
    ("experts", "save", EVERY + ',"distributed_optimizer":"on"}'),
    ("experts", "load", EVERY + ',"distributed_optimizer":"on"}'),
    ("experts", "load", '{"model":"qwen3_moe","distributed_optimizer":"on"}'),
    ("experts", "load", '{"model":"qwen3_moe","cp":2,"ep":2,"distributed_optimizer":"on"}'),
    ("lora", "save", EVERY + f',"distributed_optimizer":"on",{LORA}}}'),
    ("lora", "load", EVERY + f',"distributed_optimizer":"on",{LORA}}}'),
    ("lora", "load", f'{{"model":"qwen3_moe","distributed_optimizer":"on",{LORA}}}'),
]


@pytest.fixture(scope="module")
def two_ranks(place: Path) -> list[dict[str, Any]]:
    return launch(
        2,
        f"gather {place}/gathered {ZERO}",
        f"load {place}/gathered {ZERO}",
        f"count {place}/host {HOST}",
        *(f"{verb} {place}/{name} {layout}" for name, verb, layout in EXPERTS),
        f"save {place}/divided {DIVIDED}",
        f"load {place}/divided {DIVIDED}",
        f'load {place}/divided {{"tp":2,"distributed_optimizer":"on"}}',
        f"load {place}/gathered {HOST}",
        f"save {place}/of-experts {OF_EXPERTS}",
        f"load {place}/of-experts {OF_EXPERTS}",
        f'slow {place}/slow {{"sgd":true}}',
    )


def test_megatrons_own_form_of_the_distributed_optimizer_is_read_bit_for_bit(two_ranks: list[dict[str, Any]]) -> None:
    loaded = next(r for r in two_ranks if r["case"] == "load")
    assert loaded["same_bits"] and loaded["grad_norm"] == 0.0


def test_a_save_of_offloaded_state_takes_a_share_of_it_and_no_gradients(two_ranks: list[dict[str, Any]]) -> None:
    """Host and device are one here: a share on the host leaves nothing for the device. And it is loaded into again."""
    (counted,) = [r for r in two_ranks if r["case"] == "count"]
    share = (2 + 12) * counted["parameters"] / 2  # bf16 weights; fp32 master weights and two moments
    for rank in counted["ranks"]:
        assert 0.9 * share < rank["peak"] < 1.1 * share, counted
        assert 0.9 * share < rank["written"] < 1.2 * share + 64 * 1024, counted
        assert rank["gradients"] == 0
    assert [r for r in two_ranks if r["case"] == "load"][10]["same_bits"]


def test_experts_resume_bit_for_bit_and_in_other_layouts(two_ranks: list[dict[str, Any]]) -> None:
    loads = [r for r in two_ranks if r["case"] == "load"]
    mixed, mixed_pp, sharded, *others, lora, lora_alone = loads[1:8]
    assert all(loaded["same_bits"] for loaded in (mixed, sharded, lora, loads[11]))
    assert all(loaded["weights"] <= 1e-5 for loaded in (mixed_pp, *others, lora_alone))


def test_context_parallel_ranks_divide_the_optimizer_and_other_layouts_read_it(two_ranks: list[dict[str, Any]]) -> None:
    same, other = [r for r in two_ranks if r["case"] == "load"][8:10]
    assert same["same_bits"] and same["grad_norm"] == 0.0
    assert other["weights"] <= 1e-5, other


def test_frozen_parameters_stay_and_are_not_saved(one_rank: list[dict[str, Any]]) -> None:
    (found,) = [r for r in one_rank if r["case"] == "frozen"]
    assert found["moved"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert found["kept"] == ["linear_proj", "linear_qkv"]
    assert found["same"]


@pytest.mark.parametrize("which", range(len(VARIANTS)))
def test_resumed_equals_uninterrupted_bit_for_bit(one_rank: list[dict[str, Any]], which: int) -> None:
    loaded = [r for r in one_rank if r["case"] == "load"][which]
    assert loaded["same_bits"]
    assert loaded["same_lr"]
    assert loaded["grad_norm"] == 0.0
    assert loaded["version"] == 3
    assert loaded["extra"] == {"data": [1, 2], "name": "x"}


def test_another_optimizer_or_model_is_refused(one_rank: list[dict[str, Any]]) -> None:
    errors = {r["label"]: r["error"] for r in one_rank if r["case"] == "refuse"}
    assert "optimizer is 'adam', not 'sgd'" in errors["sgd"]
    assert "family is 'qwen3', not 'llama'" in errors["model"]


def test_the_same_layout_resumes_bit_for_bit(four_ranks: list[dict[str, Any]]) -> None:
    loads = [r for r in four_ranks if r["case"] == "load"]
    plain, sharded, lora = loads[0], loads[len(FOUR) + 1], loads[-2]
    assert plain["same_bits"]
    assert sharded["same_bits"]
    assert lora["same_bits"] and lora["grad_norm"] == 0.0


def test_other_layouts_load_and_go_on(four_ranks: list[dict[str, Any]]) -> None:
    loads = [r for r in four_ranks if r["case"] == "load"]
    assert len(loads) == len(FOUR) + 6
    assert all(r["weights"] <= 1e-5 for r in loads), loads


def test_a_file_or_the_metadata_that_one_rank_cannot_write_ends_the_save_on_all(
    four_ranks: list[dict[str, Any]],
) -> None:
    (full,) = [r for r in four_ranks if r["case"] == "full"]
    for first, second, third in full["errors"]:
        assert "cannot write" in first and "step-000001: rank 0: OSError: [Errno 28] No space left" in first
        assert "cannot write" in second and "step-000001: [Errno 28] No space left" in second and third == ""
    assert len(full["errors"]) == 4
    assert full["found"] == ["latest", "step-000001"] and full["recorded"]


def test_ranks_wait_for_a_slow_writer_longer_than_a_collective_may_take(two_ranks: list[dict[str, Any]]) -> None:
    (slow,) = [r for r in two_ranks if r["case"] == "slow"]
    assert slow["recorded"]


def test_a_start_and_a_resume_show_signs_of_life_in_phase_load(one_rank: list[dict[str, Any]]) -> None:
    """Every replica reads all weights: on a slow file system that takes longer than `watchdog.hang_s`."""
    (found,) = [r for r in one_rank if r["case"] == "frozen"]
    assert found["phases"][1:] == ["load", "load"], "one a model"
    of_weights, of_checkpoint = found["signs"]
    assert of_weights == 1.0, "one a tensor"
    assert of_checkpoint >= 2 * 2, "of two layers' two trained parameters"
