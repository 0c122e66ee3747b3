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
from megatron_tlt.models.hf.peft import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
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
    return [problem.allowed for problem in peft_problems(lora, POLICY, shapes)]


@pytest.mark.parametrize(
    ("said", "tensors", "says"),
    [
        ({"r": 8}, {}, "r in adapter_config.json must be 4, not 8"),
        ({"lora_alpha": 16}, {}, "lora_alpha in adapter_config.json must be 8.0, not 16"),
        ({"use_dora": True}, {}, "use_dora in adapter_config.json must be False, not True"),
        ({"use_rslora": True}, {}, "use_rslora in adapter_config.json must be False, not True"),
        ({"alpha_pattern": {"q_proj": 2}}, {}, "alpha_pattern in adapter_config.json must be {}, not {'q_proj': 2}"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save in adapter_config.json must be None"),
        ([1], {}, "must be a PEFT directory: "),
        ({}, {V_B: None}, f"missing: {V_B}"),
        ({}, {V_B.replace("v_proj", "k_proj"): torch.zeros(1)}, "not among actor.lora.targets: base_model.model.model"),
        ({}, {V_B: torch.zeros(4, 4)}, f"other shapes: {V_B}"),
    ],
)
def test_an_adapter_of_another_form_is_refused(tmp_path: Path, said: Any, tensors: dict, says: str) -> None:
    (problem,) = found(tmp_path, said, tensors)
    assert problem.startswith(says)


def test_entries_that_say_nothing_are_taken(tmp_path: Path) -> None:
    assert not found(tmp_path, {"modules_to_save": [], "rank_pattern": None, "lora_dropout": 0.1}, {})
