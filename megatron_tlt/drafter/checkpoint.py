"""A drafter directory: `drafter.safetensors` and `config.json`.

config.json is that of the policy, with the drafter's entries before it: `drafter` (eagle or eagle3), `policy_version`,
`trained_steps`, `policy_fingerprint`, and for eagle3 `eagle3_layers`, `draft_vocab_size`, `norm_before_residual` and
its `layer`. Directories as others publish EAGLE-3 drafters are read as well (`public.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megatron_tlt.config.drafter_kinds import DRAFTERS
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.drafter.fingerprint import other_policy_problem
from megatron_tlt.drafter.public import is_public, public_config, read_public
from megatron_tlt.errors import CheckpointError, ConfigError, ConfigProblem
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.config import DrafterConfig
from megatron_tlt.models.hf_writer import write_tensors
from megatron_tlt.observe.files import replace_files

WEIGHTS, CONFIG = "drafter.safetensors", "config.json"
KIND, KIND3 = "eagle", "eagle3"


@dataclass(frozen=True, slots=True)
class SavedDrafter:
    """All tensors of a drafter, on the CPU, and where they come from."""

    config: DrafterConfig
    weights: Mapping[str, Tensor]
    policy_version: int = 0  # of the policy whose hidden states it was last trained on
    trained_steps: int = 0
    fingerprint: Mapping[str, str] = field(default_factory=dict)  # `policy_fingerprint` of its policy

    def to_json(self, dtype: torch.dtype) -> dict[str, Any]:
        """The contents of config.json; `dtype` is that of the weights beside it."""
        name = str(dtype).removeprefix("torch.")
        origin = {"policy_version": self.policy_version, "trained_steps": self.trained_steps}
        made_for = {"policy_fingerprint": dict(self.fingerprint)}
        return {**describe(self.config), **origin, **made_for, **self.config.policy.to_hf(name)}


def describe(config: DrafterConfig) -> dict[str, Any]:
    """What config.json and checkpoints say of a drafter beside its policy's shape; `described` reads it."""
    if config.kind == KIND:
        return {"drafter": KIND}
    layer = config.layer.to_hf() | {"torch_dtype": None}
    own = {"eagle3_layers": list(config.aux_layers), "draft_vocab_size": config.draft_vocab_size}
    return {"drafter": KIND3, **own, "norm_before_residual": config.norm_before_residual, "layer": layer}


def drafter_shape(section: SpeculationSection, policy: ModelConfig) -> DrafterConfig:
    """Of a fresh drafter. Raises ConfigError for a section that names no trained drafter, and for layers or a
    vocabulary that the policy does not have.
    """
    if section.trained is None:
        allowed = f"names no drafter that is trained: {', '.join(map(repr, DRAFTERS))}"
        raise ConfigError.of("rollout.speculation.drafter", section.drafter, allowed)
    if section.drafter == KIND:
        return DrafterConfig.eagle(policy)
    return DrafterConfig.eagle3(policy, section.layers, section.draft_vocab_size)


def save_drafter(
    directory: str | Path,
    config: DrafterConfig,
    weights: Mapping[str, Tensor],
    *,
    policy_version: int = 0,
    trained_steps: int = 0,
    fingerprint: Mapping[str, str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes a drafter directory; see `SavedDrafter`. An older drafter there is replaced.

    Raises CheckpointError for wrong tensors, before anything is written, and for a disk that is full.
    """
    drafter = SavedDrafter(config, weights, policy_version, trained_steps, fingerprint or {})
    config.check(weights)
    write_directory(
        Path(directory), {WEIGHTS: cast_tensors(weights, dtype)}, {CONFIG: drafter.to_json(dtype)}
    )


def load_drafter(
    directory: str | Path, policy: ModelConfig | None = None, wanted: SpeculationSection | None = None
) -> SavedDrafter:
    """Reads a drafter directory, of a policy of shape `policy` and as `wanted`, where those are given; a public one
    needs the policy.

    Raises CheckpointError for a directory that is none, and one that names every tensor that does not fit.
    """
    root = Path(directory)
    about = read_about(root)
    config = _config_of(about, root, policy, wanted)
    if is_public(about):
        weights = read_public(root, config)
    else:
        try:
            weights = load_file(str(root / WEIGHTS))
        except (OSError, SafetensorError) as e:
            raise CheckpointError(f"{root / WEIGHTS} cannot be read: {e}") from e
    try:
        config.check(weights)
    except CheckpointError as e:
        raise CheckpointError(f"{root}: {e}") from e
    version, steps = int(about.get("policy_version", 0)), int(about.get("trained_steps", 0))
    return SavedDrafter(config, weights, version, steps, about.get("policy_fingerprint", {}))


def drafter_problems(
    speculation: SpeculationSection,
    policy: ModelConfig,
    model: str | Path,
    tokenizer: str | Path | None = None,
) -> list[ConfigProblem]:
    """What keeps the policy in `model`, of shape `policy`, from drafting as configured. Reads the drafter."""
    at, path = "rollout.speculation.drafter_path", speculation.drafter_path
    if speculation.trained is None:
        return []
    if path is None:
        try:
            drafter_shape(speculation, policy)
        except ConfigError as error:
            return list(error.problems)
        return []
    try:
        made_for = load_drafter(path, policy, speculation).fingerprint
    except CheckpointError as error:
        return [ConfigProblem(at, path, str(error))]
    problem = None
    if not speculation.allow_other_policy:
        problem = other_policy_problem(at, path, made_for, model, tokenizer)
    return [] if problem is None else [problem]


def read_about(directory: Path) -> dict[str, Any]:
    """config.json of a drafter directory. Raises CheckpointError for any other directory."""
    file = directory / CONFIG
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(
            f"{file} cannot be read: {e} (megatron-tlt drafter makes such a directory)"
        ) from e
    if not isinstance(about, dict) or (about.get("drafter") not in (KIND, KIND3) and not is_public(about)):
        kind = about.get("drafter") if isinstance(about, dict) else None
        raise CheckpointError(
            f"{file} describes no drafter: drafter = {kind!r} must be {KIND!r} or {KIND3!r}, or the architecture "
            "one of EAGLE-3"
        )
    return about


def _config_of(
    about: Mapping[str, Any], root: Path, policy: ModelConfig | None, wanted: SpeculationSection | None
) -> DrafterConfig:
    """The drafter that config.json describes. Raises CheckpointError where it is not the one that is wanted."""
    file = root / CONFIG
    try:
        if is_public(about):
            if policy is None:
                raise CheckpointError("has no shape of the policy: it must be given")
            config = public_config(about, policy, None if wanted is None else wanted.layers)
        else:
            config = described(about, policy or ModelConfig.from_hf(about))
    except (CheckpointError, ConfigError) as e:
        raise CheckpointError(f"{file}: {e}") from e
    if wanted is None:
        return config
    found = {"drafter": config.kind, "layers": config.aux_layers, "draft_vocab_size": config.draft_vocab_size}
    for name, value in found.items():
        given = getattr(wanted, name)
        if given is not None and given != value:
            raise CheckpointError(f"{file} has {name} = {value}, but rollout.speculation.{name} = {given}")
    return config


def described(about: Mapping[str, Any], policy: ModelConfig) -> DrafterConfig:
    """What `describe` was given. Raises ConfigError or CheckpointError for what it never returns."""
    if about["drafter"] == KIND:
        return DrafterConfig.eagle(policy)
    layers, size, own = about.get("eagle3_layers"), about.get("draft_vocab_size"), about.get("layer")
    if not isinstance(layers, list) or not all(isinstance(i, int) for i in layers):
        raise CheckpointError(f"eagle3_layers = {layers!r} must be a list of three ids")
    if not isinstance(size, int):
        raise CheckpointError(f"draft_vocab_size = {size!r} must be an integer")
    layer = None if own is None else ModelConfig.from_hf(own)
    return DrafterConfig.eagle3(policy, tuple(layers), size, layer, bool(about.get("norm_before_residual")))


def cast_tensors(named: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Contiguous CPU copies; integers keep their type. Raises CheckpointError for a value that is not finite."""
    out = {}
    for name, tensor in named.items():
        stored = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        if not bool(torch.isfinite(stored).all()):
            raise CheckpointError(
                f"{name} has values that are not finite in {str(dtype).removeprefix('torch.')}"
            )
        out[name] = stored.contiguous().clone()
    return out


def write_directory(
    out: Path, tensors: Mapping[str, dict[str, Tensor]], texts: Mapping[str, dict[str, Any] | str]
) -> None:
    """Writes safetensors files, and JSON or text files, into `out`, which may exist. Raises CheckpointError.

    A crash leaves the old directory or one that is refused (`replace_files`).
    """
    try:
        with replace_files(out, CONFIG) as scratch:
            for name, value in texts.items():
                text = value if isinstance(value, str) else json.dumps(value, indent=2) + "\n"
                (scratch / name).write_text(text, encoding="utf-8")
            for name, named in tensors.items():
                write_tensors(scratch / name, named, {"format": "pt"})
    except OSError as e:
        raise CheckpointError(f"{out} cannot be written: {e}") from e
