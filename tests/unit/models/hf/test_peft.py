"""PEFT directories that a run cannot start from, each refused with what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_tlt.actor.hf_names import adapter_slots
from megatron_tlt.config.actor import LoraSection
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.peft import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    _matrices,
    adapter_config,
    peft_problems,
    stored_factors,
)
from tests.helpers.tiny_drafters import DEEP

POLICY = DEEP["qwen3"]
V_B = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"


def found(folder: Path, said: Any, tensors: dict[str, torch.Tensor | None]) -> list[str]:
    """Problems with an adapter of rank 4 of q and v, with changed entries and tensors (None: without it)."""
    lora = LoraSection(rank=4, alpha=8.0, targets=("q_proj", "v_proj"), adapter_path=str(folder))
    shapes = {slot.hf_names[0]: shape for slot, shape in adapter_slots(POLICY, lora, 1).items()}
    stored = {stored_factors(POLICY, name)[0]: torch.zeros(shape) for name, shape in shapes.items()} | tensors
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, folder / ADAPTER_WEIGHTS)
    about = adapter_config(lora, POLICY, shapes, "base") | said if isinstance(said, dict) else said
    (folder / ADAPTER_CONFIG).write_text(json.dumps(about))
    return [str(problem).replace(str(folder), "DIR") for problem in peft_problems(lora, POLICY, shapes)]


@pytest.mark.parametrize(
    ("said", "tensors", "says"),
    [
        ({"r": "8"}, {}, "r in adapter_config.json must be a number above 0, not '8'"),
        ({"use_dora": True}, {}, "use_dora in adapter_config.json must be False, not True"),
        ([1], {}, "must be a PEFT directory: "),
        ({}, {V_B: None}, f"missing: {V_B}"),
        ({}, {V_B.replace("v_proj", "x_proj"): torch.zeros(1)}, "not among actor.lora.targets: base_model.model.model"),
        ({}, {V_B: torch.zeros(4, 4)}, f"other shapes: {V_B}"),
    ],
)
def test_an_adapter_of_another_form_is_refused(tmp_path: Path, said: Any, tensors: dict, says: str) -> None:
    (problem,) = found(tmp_path, said, tensors)
    assert problem.startswith(f"actor.lora.adapter_path = 'DIR': {says}")


V_BS = [V_B.replace(".1.", f".{i}.") for i in range(POLICY.num_layers)]
TARGETS = "targets = ['q_proj', 'v_proj']"


@pytest.mark.parametrize(
    ("said", "tensors", "says"),
    [
        (
            {"r": 16, "lora_alpha": 4},
            {V_B: torch.zeros(4, 4), V_B.replace("v_proj", "k_proj"): torch.zeros(4, 4)},
            [
                "rank = 4: must be 16, r of DIR/adapter_config.json",
                "alpha = 8.0: must be 4, lora_alpha of DIR/adapter_config.json",
                f"{TARGETS}: must be [q_proj, k_proj, v_proj], the matrices in DIR/adapter_model.safetensors",
            ],
        ),
        (
            {"target_modules": ["q_proj"]},
            dict.fromkeys([*V_BS, *(name.replace("lora_B", "lora_A") for name in V_BS)]),
            [f"{TARGETS}: must be [q_proj], the matrices in DIR/adapter_model.safetensors"],
        ),
    ],
)
def test_settings_of_an_adapter_are_named_with_their_values_and_nothing_else(
    tmp_path: Path, said: Any, tensors: dict, says: list[str]
) -> None:
    assert found(tmp_path, said, tensors) == [f"actor.lora.{text}" for text in says]


def test_targets_are_read_from_the_names_of_experts_of_the_family() -> None:
    policy = ModelConfig("mixtral", 64, 32, 1, 4, 2, 8, 48, num_experts=2, moe_layers=(0,))
    assert _matrices(policy, "up_proj") == {"up_proj", "w3"} and _matrices(policy, "q_proj") == {"q_proj"}


def test_entries_that_say_nothing_are_taken(tmp_path: Path) -> None:
    assert not found(tmp_path, {"modules_to_save": [], "rank_pattern": None, "lora_dropout": 0.1}, {})
