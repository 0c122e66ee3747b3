"""From a YAML file and dotted overrides to a frozen configuration, with every problem found at once."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML

from megatron_tlt.config.base import IN_WORDS, Section
from megatron_tlt.config.checks.speculation import check_speculation
from megatron_tlt.config.checks.texts import check_nulls, check_texts, switches_as_text
from megatron_tlt.config.elsewhere import Here, leaves, name_here
from megatron_tlt.config.env import EnvSection
from megatron_tlt.config.paths import resolve_paths
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.config.root import Config
from megatron_tlt.config.schema import (
    allowed_text,
    element_of,
    field_allowed,
    nearest_path,
    section_of,
)
from megatron_tlt.config.yaml_reader import (
    DEFAULTS_KEY,
    Files,
    deep_merge,
    file_with,
    has_comment,
    parse_yaml,
    read_config_file,
    unshared,
)
from megatron_tlt.errors import ConfigError, ConfigProblem
from megatron_tlt.types import BackendName

RootT = TypeVar("RootT", bound=Section)

_UNKNOWN = "unknown key"

# Fields of `rollout` that `generate` does not read: it has options of its own, and is the embedded engine of all ranks,
# which generates whole responses.
_NOT_READ = ("tp", "backend", *get_args(BackendName), "schedule", "samples_per_prompt", "temperature", "top_k", "top_p",
             "min_p", "max_tokens", "carry_over", "stop")  # fmt: skip


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    root: type[RootT] = Config,  # type: ignore[assignment]
    notes: list[str] | None = None,
) -> RootT:
    """The configuration in `path` with `overrides` (`"a.b.c=value"`, values typed as in YAML) on top.

    A step of an override's path may be a list index: `data.train.tasks.0.weight=2`. An override may be a YAML file,
    whose values then replace earlier ones. Raises ConfigError with all problems of the file and of the overrides.
    `notes`: gets what the user should read first.
    """
    files: Files = []
    return build_config(read_config_file(Path(path), root, files=files), overrides, root, notes, files)


def is_file(override: str) -> bool:
    """Whether an override is a YAML file, not a value."""
    return "=" not in override and override.endswith((".yaml", ".yml"))


def build_config(
    values: dict[str, Any],
    overrides: Sequence[str] = (),
    root: type[RootT] = Config,  # type: ignore[assignment]
    notes: list[str] | None = None,
    files: Files | None = None,
) -> RootT:
    """Like `load_config`, from a mapping in memory; `values` is not changed. `files`: those that `values` were read
    from; gets those of `overrides`. Raises ConfigError.
    """
    tree, files = unshared(values), [] if files is None else files
    problems: list[ConfigProblem] = []
    for override in overrides:
        try:
            if is_file(override):
                tree = deep_merge(tree, read_config_file(Path(override), root, files=files))
            else:
                apply_override(tree, override)
        except ConfigError as error:
            problems += error.problems
    notes = [] if notes is None else notes
    tree = resolve_paths(tree, problems, notes)
    problems += check_texts(tree)
    try:
        config = root.model_validate(tree)
    except ValidationError as error:
        problems += [_with_file(problem, files) for problem in _explain(error, root)]
    else:
        problems += check_nulls(config)
    if problems:
        raise ConfigError(problems)
    notes.extend(switches_as_text(config))
    return config


def load_engine(overrides: Sequence[str], env: str | None = None) -> tuple[RolloutSection, EnvSection | None]:
    """The sections `rollout` and `env` of `generate` from overrides alone (`"rollout.a.b=value"`).

    `env`: the environment's kind, or its path (with a colon); without it no other setting of `env` is taken. Raises
    ConfigError with all problems, also for fields that `generate` takes from options of its own or not at all.
    """
    problems = []
    for override in overrides:
        root, _, rest = override.partition(".")
        if root == "env" and rest and env is not None:
            continue
        if root != "rollout" or not rest:
            allowed = "must look like rollout.key=value, or with --env env.key=value"
            problems.append(ConfigProblem("override", override, allowed))
        elif re.split(r"[.=]", rest, maxsplit=1)[0] in _NOT_READ:
            problems.append(ConfigProblem("override", override, "not read by generate: see its --help"))
    if problems:
        raise ConfigError(problems)
    values: dict[str, Any] = {"model": {"path": ""}}
    if env is not None:
        values["env"] = {"path" if ":" in env else "kind": env}
    config = build_config(values, overrides, Config)
    if problems := list(check_speculation(config.rollout.speculation)):
        raise ConfigError(problems)
    return config.rollout, config.env


def dump_config(config: Section) -> str:
    """The whole configuration as YAML, defaults included; `load_config` reads it back to an equal value."""
    writer, text = YAML(typ="safe", pure=True), io.StringIO()
    writer.default_flow_style, writer.sort_base_mapping_type_on_output, writer.width = False, False, 110  # type: ignore[assignment]
    writer.dump(config.model_dump(mode="json"), text)
    return text.getvalue()


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Sets one `path=value` in `tree`, making missing maps on the way; a map merges into the one that is there, as in
    `deep_merge`, an element of a list is replaced. Mutates `tree`. Raises ConfigError.
    """
    path, sign, text = override.partition("=")
    path = re.sub(r"\[(\d+)\]", r".\1", path.strip())
    keys = path.split(".")
    if not sign or not all(keys):
        raise ConfigError.of("override", override, "must look like section.key=value")
    if has_comment(text):
        allowed = f"has a # that begins a comment of YAML: write a text with it in quotes of its own: '{path}=\"..\"'"
        raise ConfigError.of(path, text, allowed)
    value = parse_yaml(text, path)
    node: Any = tree
    for depth, key in enumerate(keys[:-1]):
        node = _child(node, key, ".".join(keys[: depth + 1]))
    if isinstance(node, list):
        node[_index(node, keys[-1], path)] = value
    elif isinstance(node, dict):
        node.update(deep_merge(node, {keys[-1]: value}))
    else:
        raise ConfigError.of(path, text, f"{'.'.join(keys[:-1])} is a single value, not a section")


def _child(node: Any, key: str, path: str) -> Any:
    """The map or list under `key`, made if it is missing."""
    if isinstance(node, list):
        return node[_index(node, key, path)]
    if not isinstance(node, dict):
        raise ConfigError.of(path, node, "is below a single value, not a section")
    if node.get(key) is None:
        node[key] = {}
    return node[key]


def _index(node: list[Any], key: str, path: str) -> int:
    if not key.isdigit() or int(key) >= len(node):
        allowed = f"one of the indices 0 to {len(node) - 1}" if node else "nothing: the list is empty"
        raise ConfigError.of(path, key, f"a list takes {allowed}")
    return int(key)


def _explain(error: ValidationError, root: type[BaseModel]) -> list[ConfigProblem]:
    """pydantic's errors as problems, one for each path."""
    problems: dict[str, ConfigProblem] = {}
    for detail in error.errors():
        for problem in _problems(detail, root):
            problems.setdefault(problem.path, problem)
    return list(problems.values())


def _problems(detail: ErrorDetails, root: type[BaseModel]) -> list[ConfigProblem]:
    """Walks the model along the error's location; parts that are no names (union branches) end the path."""
    annotation: Any = root
    allowed = "mapping of sections"
    steps: list[str] = []
    for part in detail["loc"]:
        section = section_of(annotation)
        if isinstance(part, int) and section is None:
            annotation = element_of(annotation)
            allowed = allowed_text(annotation)
        elif section is not None and part in section.model_fields:
            field = section.model_fields[part]
            annotation = field.annotation
            allowed = field_allowed(field)
        elif section is not None and detail["type"] in ("extra_forbidden", "invalid_key"):
            return _unknown_keys(root, section, ".".join(steps), str(part), detail["input"])
        else:
            break
        steps.append(str(part))
    path = ".".join(steps) or "config"
    if detail["type"] == IN_WORDS:
        return [ConfigProblem(path, detail["input"], detail["msg"])]
    if detail["type"] == "missing":
        is_run = path == "model" and root is Config
        hint = f"; `{DEFAULTS_KEY}: [configs/quickstart.yaml]` brings all settings" if is_run else ""
        return [ConfigProblem(path, None, f"is required: {allowed}{hint}")]
    return [ConfigProblem(path, detail["input"], f"must be {allowed}")]


def _with_file(problem: ConfigProblem, files: Files) -> ConfigProblem:
    """The problem of a key that is not known, with the file in which it stands; others as they are."""
    file = file_with(problem.path, files) if problem.allowed.startswith(_UNKNOWN) else None
    if file is None:
        return problem
    return replace(problem, allowed=f"{_UNKNOWN} in {file}{problem.allowed.removeprefix(_UNKNOWN)}")


def _unknown_keys(
    root: type[BaseModel], section: type[BaseModel], parent: str, key: str, value: Any
) -> list[ConfigProblem]:
    """Of a key that `section` at `parent` does not have; of a tree of another framework, each of its settings."""
    path = f"{parent}.{key}" if parent else key
    if path == "sft":
        return [ConfigProblem(path, value, f"{_UNKNOWN}; a config of `megatron-tlt sft` (and `check --sft`)")]
    found = {at: (inner, name_here(root, parent, at)) for at, inner in leaves(path, value)}
    if any(here is not None for _, here in found.values()):
        return [ConfigProblem(at, inner, _unknown(here)) for at, (inner, here) in found.items()]
    near = nearest_path(root, section, parent, key)
    hint = f"did you mean {near}?" if near else f"known here: {', '.join(section.model_fields)}"
    return [ConfigProblem(path, value, f"{_UNKNOWN}; {hint}")]


def _unknown(here: Here | None) -> str:
    """What is allowed in place of another framework's setting."""
    if here is None:
        return _UNKNOWN
    if not here.path:
        return f"{_UNKNOWN}; there is none here ({here.note})"
    return f"{_UNKNOWN}; did you mean {here.path}?{f' ({here.note})' if here.note else ''}"
