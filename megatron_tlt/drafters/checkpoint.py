"""A drafter directory: `drafter.safetensors` and `config.json`.

config.json is that of the policy, with the drafter's entries before it: `drafter` (its kind), `policy_version`,
`trained_steps`, `policy_fingerprint`, and the entries of its kind. Directories as others publish them are read as well
(`PublicForm`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megatron_tlt.config.drafter_kinds import DRAFTERS
from megatron_tlt.config.json_reader import read_object
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.drafters.base import PublicForm, SavedDrafter, cast_tensors
from megatron_tlt.drafters.fingerprint import other_policy_problem
from megatron_tlt.drafters.model import DrafterConfig
from megatron_tlt.drafters.published import table_problems
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.errors import CheckpointError, ConfigError, ConfigProblem
from megatron_tlt.interfaces import CAPABILITIES
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.fields import known_fields
from megatron_tlt.models.hf.writer import write_tensors
from megatron_tlt.observe.files import replace_files
from megatron_tlt.types import BackendName

WEIGHTS, CONFIG = "drafter.safetensors", "config.json"


def about_of(drafter: SavedDrafter, dtype: torch.dtype) -> dict[str, Any]:
    """The contents of config.json; `dtype` is that of the weights beside it."""
    name = str(dtype).removeprefix("torch.")
    origin = {"policy_version": drafter.policy_version, "trained_steps": drafter.trained_steps}
    made_for = {"policy_fingerprint": {"embedding": drafter.fingerprint}}
    return {**drafter_entries(drafter.config), **origin, **made_for, **drafter.config.policy.to_hf(name)}


def drafter_entries(config: DrafterConfig) -> dict[str, Any]:
    """The entries of config.json and of checkpoints for a drafter, beside its policy's shape."""
    return {"drafter": config.kind, **KINDS[config.kind].entries(config)}


def read_drafter_config(about: Mapping[str, Any], policy: ModelConfig) -> DrafterConfig:
    """The drafter of such entries. Raises ConfigError or CheckpointError for entries that `drafter_entries` never
    returns.
    """
    return KINDS[about["drafter"]].read_entries(about, policy)


def drafter_differences(about: Mapping[str, Any], config: DrafterConfig) -> list[str]:
    """How the drafter of such entries differs from `config`, of the same policy, entry by entry."""
    if about.get("drafter") != config.kind:
        return [f"the drafter is {about.get('drafter')!r}, not {config.kind!r}"]
    try:
        read = read_drafter_config(about, config.policy)
    except (CheckpointError, ConfigError) as e:
        return [f"the drafter's entries do not fit the policy: {e}"]
    found, wanted = (_flat(drafter_entries(drafter)) for drafter in (read, config))
    names = [name for name in wanted | found if found.get(name) != wanted.get(name)]
    return [f"the drafter's {name} is {found.get(name)!r}, not {wanted.get(name)!r}" for name in names]


def _flat(entries: Mapping[str, Any]) -> dict[str, Any]:
    """With the entries of its layer beside the others."""
    layer = entries.get("layer", {})
    return {name: v for name, v in entries.items() if name != "layer"} | {f"layer.{n}": v for n, v in layer.items()}


def configured_drafter(section: SpeculationSection, policy: ModelConfig) -> DrafterConfig | None:
    """The trained drafter that `section` names or that training would begin with; None without one. Reads no tensor.

    Raises CheckpointError for a directory that is none or not as wanted, ConfigError as `drafter_shape`.
    """
    if section.trained is None:
        return None
    if section.drafter_path is None:
        return drafter_shape(section, policy)
    root = Path(section.drafter_path)
    return _config_of(read_about(root), root, policy, section)


def drafter_shape(section: SpeculationSection, policy: ModelConfig) -> DrafterConfig:
    """Of a fresh drafter. Raises ConfigError for a section that names no trained drafter, and for layers or a
    vocabulary that the policy does not have.
    """
    if section.trained is None:
        allowed = f"names no drafter that is trained: {', '.join(map(repr, DRAFTERS))}"
        raise ConfigError.of("rollout.speculation.drafter", section.drafter, allowed)
    return KINDS[section.drafter].fresh(section, policy)


def save_drafter(
    directory: str | Path,
    config: DrafterConfig,
    weights: Mapping[str, Tensor],
    *,
    policy_version: int = 0,
    trained_steps: int = 0,
    fingerprint: str = "",
) -> None:
    """Writes a drafter directory in fp32; see `SavedDrafter`. An older drafter there is replaced.

    Raises CheckpointError for wrong tensors, before anything is written, and for a disk that is full.
    """
    drafter = SavedDrafter(config, weights, policy_version, trained_steps, fingerprint)
    config.check(weights)
    tensors, about = cast_tensors(weights, torch.float32), about_of(drafter, torch.float32)
    write_directory(Path(directory), {WEIGHTS: tensors}, {CONFIG: about})


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
    if (public := _public_form(about)) is not None:
        weights = public.read(root, config)
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
    return SavedDrafter(config, weights, version, steps, _fingerprint(about))


def _fingerprint(about: Mapping[str, Any]) -> str:
    return str(about.get("policy_fingerprint", {}).get("embedding", ""))


def drafter_problems(
    speculation: SpeculationSection, policy: ModelConfig, model: str | Path | None, backend: BackendName = "embedded"
) -> list[ConfigProblem]:
    """Problems of the policy in `model`, of shape `policy`, and of the rollout engine with the configured drafter,
    which is read. `model`: None where the policy starts from `model.megatron_path`, which no drafter is compared with.
    """
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
        drafter = load_drafter(path, policy, speculation)
    except CheckpointError as error:
        return [ConfigProblem(at, path, str(error))]
    found = _engine_problems(at, path, drafter.config, backend)
    if model is not None and not speculation.allow_other_policy:
        found += other_policy_problems(at, path, drafter, model)
    return found


def _engine_problems(field: str, path: str, config: DrafterConfig, backend: BackendName) -> list[ConfigProblem]:
    """A form of drafter that the rollout engine lacks; a kind that it lacks is refused by the configuration alone."""
    kinds = CAPABILITIES[backend].drafters
    if backend == "embedded" or (kinds is not None and config.kind not in kinds):
        return []
    problem = KINDS[config.kind].rollout_problem(config, backend)
    instead = f"rollout.backend must be 'embedded' with it, not {backend!r}"
    return [ConfigProblem(field, path, f"{problem}: {instead}")] if problem else []


def other_policy_problems(
    field: str, path: str | Path, drafter: SavedDrafter, model: str | Path
) -> list[ConfigProblem]:
    """Problems at `field` where the drafter in `path` was made for another policy than `model`, by its fingerprint or,
    of a published one, by its own copies of the policy's tables.
    """
    if (public := _public_form(read_about(Path(path)))) is None:
        problem = other_policy_problem(field, path, drafter.fingerprint, model)
        return [] if problem is None else [problem]
    offsets = drafter.weights.get("d2t")
    ids = None if offsets is None else torch.arange(len(offsets)) + offsets
    found = table_problems(public.copies(Path(path)), ids, drafter.config.policy, Path(model))
    why = "made for another policy, or with tables of its own, which are not computed here"
    accepts = "rollout.speculation.allow_other_policy=true drafts with the policy's"
    return [ConfigProblem(field, str(path), f"{text}: {why}; {accepts}") for text in found]


def drafter_warnings(
    speculation: SpeculationSection, policy: ModelConfig, argument: Path | None = None, in_megatron: bool = False
) -> list[str]:
    """What is guessed, not read, or not checked of the configured drafter, or of the one that `argument`, a command's
    --drafter, gives. `in_megatron`: the policy starts from `model.megatron_path`.
    """
    path = speculation.drafter_path if argument is None else argument
    if speculation.trained is None or path is None:
        return []
    about = read_about(Path(path))
    if (public := _public_form(about)) is not None:
        found = public.warnings(Path(path), about, policy, speculation.layers)
        is_checked = bool(public.copies(Path(path)))
    else:
        found, is_checked = [], bool(_fingerprint(about))
    if not is_checked:
        found.append("has nothing of the policy that it was made for: not checked")
    elif in_megatron and not speculation.allow_other_policy:
        found.append("not checked: the policy starts from model.megatron_path")
    field = "rollout.speculation.drafter_path" if argument is None else "--drafter"
    return [f"{field} = {path}: {text}" for text in found]


def read_about(directory: Path) -> dict[str, Any]:
    """config.json of a drafter directory. Raises CheckpointError for any other directory."""
    file = directory / CONFIG
    about = read_object(file)
    name = about.get("drafter")
    if name not in KINDS and _public_form(about) is None:
        allowed = f"must be {' or '.join(map(repr, KINDS))}, or the architecture a published drafter's"
        raise CheckpointError(f"{file} describes no drafter: drafter = {name!r} {allowed}")
    return about


def _public_form(about: Mapping[str, Any]) -> PublicForm | None:
    """The form of a directory that others made; None for our own."""
    return next((k.public for k in KINDS.values() if k.public is not None and k.public.is_one(about)), None)


def _config_of(
    about: Mapping[str, Any], root: Path, policy: ModelConfig | None, wanted: SpeculationSection | None
) -> DrafterConfig:
    """The drafter that config.json describes. Raises CheckpointError where it is not the one that is wanted."""
    file = root / CONFIG
    try:
        if (public := _public_form(about)) is None:
            config = read_drafter_config(about, policy or ModelConfig.from_hf(known_fields(about)))
        elif policy is None:
            raise CheckpointError("has no shape of the policy: it must be given")
        else:
            config = public.config(about, policy, None if wanted is None else wanted.layers)
    except (CheckpointError, ConfigError) as e:
        raise CheckpointError(f"{file}: {e}") from e
    if wanted is None:
        return config
    found = {"drafter": config.kind, "layers": config.aux_layers, "draft_vocab_size": config.draft_vocab_size}
    found |= {name: getattr(config, name) for name in DRAFTERS[config.kind].settings if name not in found}
    for name, value in found.items():
        given = getattr(wanted, name)
        if given is not None and given != value:
            raise CheckpointError(
                f"{file} has {name} = {value}, but rollout.speculation.{name} = {given}; without a directory "
                "(drafter_path=null, or no --drafter) a new drafter starts from the policy"
            )
    return config


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
