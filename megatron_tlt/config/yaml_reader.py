"""YAML as this project reads it: the YAML 1.2 core types, duplicate keys refused, `defaults:` inheritance.

PyYAML follows YAML 1.1, where `on` and `no` are booleans, `1e-6` is text and `12:30` a number in base 60. A
configuration full of learning rates and on/off choices needs none of that.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from megatron_tlt.errors import ConfigError

DEFAULTS_KEY = "defaults"

_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


class CoreLoader(yaml.SafeLoader):
    """SafeLoader with the scalar types of YAML 1.2 and unique keys."""


def _construct_int(loader: CoreLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


def _construct_mapping(loader: CoreLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue  # `? [a, b]`: PyYAML itself refuses keys that cannot be hashed
        if key.value in seen:
            problem = f"the key {key.value!r} is there twice"
            raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        seen.add(key.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


def _register() -> None:
    CoreLoader.yaml_implicit_resolvers = {}  # drops those of YAML 1.1 that the class inherits
    bool_or_null = (
        ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
        ("null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
        ("merge", r"^(?:<<)$", "<"),
    )
    for tag, pattern, first in bool_or_null:
        letters = [c if c != "\0" else "" for c in first]
        CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), letters)
    CoreLoader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    CoreLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    CoreLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
    CoreLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


_register()


def parse_yaml(text: str, where: str) -> Any:
    """Value of one YAML document. `where` names it in errors. Raises ConfigError with the line."""
    try:
        return yaml.load(text, Loader=CoreLoader)  # CoreLoader is a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise ConfigError.of(f"{where}{line}", text[:40], f"not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError.of(where, text[:40], f"not valid YAML: {error}") from error


def deep_merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with `over` on top: maps merge key by key, everything else (lists too) is replaced. New dict."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = deep_merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def read_config_file(path: Path, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The mapping in `path` over those it names in `defaults:` (relative to the file, later ones win).

    `chain` holds the files being read above this one, to refuse cycles. Raises ConfigError.
    """
    resolved = path.resolve()
    if resolved in chain:
        cycle = " -> ".join(p.name for p in (*chain, resolved))
        raise ConfigError.of(DEFAULTS_KEY, str(path), f"files may not inherit in a circle: {cycle}")
    own = _read_mapping(path, chain)
    names = own.pop(DEFAULTS_KEY, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError.of(f"{path}: {DEFAULTS_KEY}", names, "must be a list of YAML files")
    merged: dict[str, Any] = {}
    for name in names:
        merged = deep_merge(merged, read_config_file(path.parent / name, (*chain, resolved)))
    return deep_merge(merged, own)


def _read_mapping(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    origin = f" (named in {DEFAULTS_KEY} of {chain[-1].name})" if chain else ""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of("config file", str(path), f"cannot be read{origin}: {error}") from error
    value = parse_yaml(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError.of(str(path), type(value).__name__, "must be a mapping of sections")
    return value
