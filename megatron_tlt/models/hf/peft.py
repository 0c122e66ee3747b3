"""LoRA adapters as PEFT stores them: adapter_config.json, adapter_model.safetensors.

Inside the program a factor is `model.layers.0.self_attn.q_proj.lora_A.weight`, and those of experts are stacks
[E, ...], `model.layers.0.mlp.experts.gate_proj.lora_A.weight`. In the file every expert has its own, under the family's
names, and all names begin with `base_model.model.`, as PEFT writes them and vLLM reads them.

No torch at the top: `megatron-tlt check` compares names and shapes without it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from megatron_tlt.config.actor import LORA_TARGETS, MLP_TARGETS, LoraSection
from megatron_tlt.config.json_reader import read_object
from megatron_tlt.errors import CheckpointError, ConfigProblem, shortened
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.files import FLOATS

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"\.(\w+)\.lora_[AB]\.weight$")
_HUB_CACHE = re.compile(r".*models--[^/]+--([^/]+)/snapshots/[^/]+$")
_PLAIN: dict[str, Any] = {"peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False}
_PLAIN |= {"fan_in_fan_out": False, "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None}
# Fields of adapter_config.json that may be set, with the values that leave W + s B A as it is (None: any value). Each
# other field, known or not, must be empty: DoRA, block-diagonal factors and the like are another function of A and B.
_ALLOWED: dict[str, tuple[Any, ...] | None] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    # Not pissa*, olora, corda, loftq, lora_ga: these take B A, or a rounding, out of the base's weight at the start.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva", "mica"),
    **dict.fromkeys(
        ("r", "lora_alpha", "target_modules", "exclude_modules", "lora_dropout", "inference_mode", "auto_mapping",
         "base_model_name_or_path", "revision", "peft_version", "megatron_core", "runtime_config", "eva_config",
         "qalora_group_size", "ensure_weight_tying"),
    ),
}  # fmt: skip
_PEFT_DEFAULTS = {"r": 8, "lora_alpha": 8}  # of a file that does not say


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
    lora: LoraSection, config: ModelConfig, names: Mapping[str, Any], base: str | None, revision: str | None = None
) -> dict[str, Any]:
    """The content of adapter_config.json for the factors `names` of the model `base`, on a hub with its `revision`.

    `base`: None for one that PEFT cannot load.
    """
    modules = {stored.rsplit(".", 3)[1] for name in names for stored in stored_factors(config, name)}
    return {
        **_PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "inference_mode": True,
    }


def peft_problems(lora: LoraSection, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[ConfigProblem]:
    """Why a run cannot start from `lora.adapter_path`; `shapes`: of the factors that it needs. Reads no tensor.

    Names and shapes are compared where rank, alpha and targets are those of the file.
    """
    if lora.adapter_path is None:
        return []
    directory, settings = Path(lora.adapter_path), []
    try:
        said = read_object(directory / ADAPTER_CONFIG)
        with safe_open(str(directory / ADAPTER_WEIGHTS), framework="np") as tensors:
            parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
    except (CheckpointError, OSError, SafetensorError) as error:
        pickled = f" ({_PICKLED} is not read: save it with PEFT as {ADAPTER_WEIGHTS})"
        problems = [f"must be a PEFT directory: {error}{pickled if (directory / _PICKLED).exists() else ''}"]
    else:
        settings, problems = list(_setting_problems(lora, directory, config, said, found)), _field_problems(said)
        needed = {
            stored: shape if len(every) == 1 else shape[1:]
            for name, shape in shapes.items()
            for every in (stored_factors(config, name),)
            for stored in every
        }
        problems += [] if settings else _factor_problems(needed, found, said)
    return [*settings, *(ConfigProblem("actor.lora.adapter_path", lora.adapter_path, text) for text in problems)]


def _setting_problems(
    lora: LoraSection, directory: Path, config: ModelConfig, said: Mapping[str, Any], names: Iterable[str]
) -> Iterator[ConfigProblem]:
    """Settings that are not those of the adapter in `directory`, whose factors have these `names`."""
    for field, own, key in (("rank", lora.rank, "r"), ("alpha", lora.alpha, "lora_alpha")):
        if (there := _number(said, key)) not in (None, own):
            yield ConfigProblem(f"actor.lora.{field}", own, f"must be {there}, {key} of {directory / ADAPTER_CONFIG}")
    matrices = {found[1] for name in names if (found := _FACTOR.search(name))}
    targets = [target for target in LORA_TARGETS if _matrices(config, target) & matrices]
    if targets and set(targets) != set(lora.targets):
        allowed = f"must be [{', '.join(targets)}], the matrices in {directory / ADAPTER_WEIGHTS}"
        yield ConfigProblem("actor.lora.targets", list(lora.targets), allowed)


def _matrices(config: ModelConfig, target: str) -> set[str]:
    """The names that a target has in files: its own, and that of an expert's matrix."""
    of_experts = {f"model.layers.{layer}.mlp.experts.{target}.lora_A.weight" for layer in config.moe_layers[:1]}
    stored = [name for factor in of_experts if target in MLP_TARGETS for name in stored_factors(config, factor)]
    return {target, *(name.rsplit(".", 3)[1] for name in stored)}


def _number(said: Mapping[str, Any], key: str) -> float | None:
    """r or lora_alpha of adapter_config.json; None for what is no number above 0."""
    value = said.get(key, _PEFT_DEFAULTS[key])
    return value if type(value) in (int, float) and value > 0 else None


def _factor_problems(
    needed: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[str, tuple[int, ...]]], said: Mapping[str, Any]
) -> Iterator[str]:
    """How the factors of a file, name -> type and shape, differ from those that are needed and that PEFT applies."""
    if missing := sorted(needed.keys() - found.keys()):
        yield f"missing: {shortened(missing)}"
    if extra := sorted(found.keys() - needed.keys()):
        yield f"not among actor.lora.targets: {shortened(extra)}"
    if other := [name for name in needed.keys() & found.keys() if needed[name] != found[name][1]]:
        yield f"other shapes: {shortened(sorted(other))}"
    if quantized := [f"{name} as {dtype}" for name, (dtype, _) in found.items() if dtype not in FLOATS]:
        yield f"stored in types other than {', '.join(FLOATS)}: {shortened(quantized)}"
    modules = sorted({name.removeprefix(_PREFIX).rsplit(".", 2)[0] for name in needed})
    if idle := [module for module in modules if not _is_target(module, said)]:
        yield f"target_modules or exclude_modules in {ADAPTER_CONFIG} leave out {shortened(idle)}"


def adapter_warning(lora: LoraSection | None, model: str) -> str | None:
    """The text for an adapter that names another base than the run's; None if it names this one, or none."""
    if lora is None or lora.adapter_path is None:
        return None
    try:
        base = read_object(Path(lora.adapter_path) / ADAPTER_CONFIG).get("base_model_name_or_path")
    except CheckpointError:
        return None
    if not isinstance(base, str) or not base or is_same_model(base, model):
        return None
    return f"actor.lora.adapter_path: {ADAPTER_CONFIG} says that the adapters are of {base}; model.path is {model}"


def is_same_model(base: str, model: str) -> bool:
    """Whether two names or paths may mean one model: the same place, or the same last word."""
    if os.path.exists(base) and os.path.exists(model) and os.path.samefile(base, model):
        return True
    words = [_HUB_CACHE.sub(r"\1", text.rstrip("/").partition("@")[0]).rpartition("/")[2] for text in (base, model)]
    return words[0].lower() == words[1].lower()


def _field_problems(said: Mapping[str, Any]) -> list[str]:
    """Fields of adapter_config.json that say no rank or scale, or another function than W + s B A."""
    wrong = [name for name in _PEFT_DEFAULTS if _number(said, name) is None]
    problems = [f"{name} in {ADAPTER_CONFIG} must be a number above 0, not {said[name]!r}" for name in wrong]
    for name, value in {"peft_type": None, **said}.items():
        allowed = _ALLOWED.get(name, ())
        if allowed is None or (name not in _ALLOWED and (value is False or value is None or value in ({}, [], ""))):
            continue
        if not any(type(value) is type(one) and value == one for one in allowed):
            must = repr(_PLAIN[name]) if name in _PLAIN else " or ".join(map(repr, allowed)) or "empty"
            problems.append(f"{name} in {ADAPTER_CONFIG} must be {must}, not {value!r}")
    return problems


def _is_target(module: str, said: Mapping[str, Any]) -> bool:
    """Whether PEFT applies the adapter to a module, by target_modules and exclude_modules: a pattern, or last words."""

    def matches(patterns: Any) -> bool:
        if isinstance(patterns, str):
            try:
                return re.fullmatch(patterns, module) is not None
            except re.error:
                return False
        return isinstance(patterns, list) and any(f".{module}".endswith(f".{pattern}") for pattern in patterns)

    targets, excluded = said.get("target_modules"), said.get("exclude_modules")
    return (targets == "all-linear" or matches(targets)) and not (excluded and matches(excluded))


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
