"""LoRA adapters as PEFT stores them: adapter_config.json, adapter_model.safetensors.

Inside the program a factor is `model.layers.0.self_attn.q_proj.lora_A.weight`, and those of experts are stacks
[E, ...], `model.layers.0.mlp.experts.gate_proj.lora_A.weight`. In the file every expert has its own, under the family's
names, and all names begin with `base_model.model.`, as PEFT writes them and vLLM reads them.

No torch at the top: `megatron-tlt check` compares names and shapes without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from megatron_tlt.config.actor import LoraSection
from megatron_tlt.errors import CheckpointError, ConfigProblem, shortened
from megatron_tlt.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Fields of adapter_config.json that change what an adapter means, with the only value that is read.
_PLAIN: dict[str, Any] = {"peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False}
_PLAIN |= {"fan_in_fan_out": False, "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None}


def stored_factors(config: ModelConfig, name: str) -> tuple[str, ...]:
    """The file's names of a factor: one, or one an expert."""
    matrix, factor = name.removesuffix(".weight").rsplit(".", 1)
    stem, _, target = matrix.rpartition(".")
    if not stem.endswith(".mlp.experts"):
        found = config.names_on_disk(f"{matrix}.weight")
    elif target == "down_proj":
        found = config.names_on_disk(matrix)
    else:
        found = config.names_on_disk(f"{stem}.gate_up_proj")[target == "up_proj" :: 2]
    return tuple(f"{_PREFIX}{stored.removesuffix('.weight')}.{factor}.weight" for stored in found)


def adapter_config(
    lora: LoraSection, config: ModelConfig, names: Mapping[str, Any], base: str
) -> dict[str, Any]:
    """The content of adapter_config.json for the factors `names` of the model `base`."""
    modules = {stored.rsplit(".", 3)[1] for name in names for stored in stored_factors(config, name)}
    return {
        **_PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "inference_mode": True,
    }


def peft_problems(
    lora: LoraSection, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> list[ConfigProblem]:
    """Why a run cannot start from `lora.adapter_path`; `shapes`: of the factors that it needs. Reads no tensor."""
    if lora.adapter_path is None:
        return []
    directory, problems = Path(lora.adapter_path), []
    try:
        said = dict(json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8")))
        with safe_open(str(directory / ADAPTER_WEIGHTS), framework="np") as tensors:
            found = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        return [
            ConfigProblem("actor.lora.adapter_path", lora.adapter_path, f"must be a PEFT directory: {error}")
        ]
    wanted = {"r": lora.rank, "lora_alpha": lora.alpha}
    for name, value in {**_PLAIN, **wanted}.items():
        there = said.get(name, value)
        if there != value and (there or value):
            problems.append(f"{name} in {ADAPTER_CONFIG} must be {value!r}, not {there!r}")
    needed = {
        stored: shape if len(every) == 1 else shape[1:]
        for name, shape in shapes.items()
        for every in (stored_factors(config, name),)
        for stored in every
    }
    if missing := sorted(needed.keys() - found.keys()):
        problems.append(f"missing: {shortened(missing)}")
    if extra := sorted(found.keys() - needed.keys()):
        problems.append(f"not among actor.lora.targets: {shortened(extra)}")
    if other := [name for name in needed.keys() & found.keys() if needed[name] != found[name]]:
        problems.append(f"other shapes: {shortened(sorted(other))}")
    return [ConfigProblem("actor.lora.adapter_path", lora.adapter_path, problem) for problem in problems]


def peft_reader(
    lora: LoraSection, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> Callable[[str], Tensor]:
    """Reads the factors of `lora.adapter_path` by name, as stored. Raises CheckpointError if they do not fit."""
    import torch

    if problems := peft_problems(lora, config, shapes):
        raise CheckpointError("; ".join(str(problem) for problem in problems))
    tensors: Any = safe_open(str(Path(lora.adapter_path or "") / ADAPTER_WEIGHTS), framework="pt")

    def read(name: str) -> Tensor:
        parts = [tensors.get_tensor(stored) for stored in stored_factors(config, name)]
        return torch.stack(parts) if len(shapes[name]) == 3 else parts[0]

    return read
