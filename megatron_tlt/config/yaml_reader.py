"""Configuration files: YAML 1.2 (ruamel.yaml: `on` is text, `1e-6` a number, a key that stands twice an error) with
`defaults:` inheritance.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from megatron_tlt.config.paths import mark_paths
from megatron_tlt.errors import ConfigError, no_such_file

DEFAULTS_KEY = "defaults"
_QUOTED = 100  # characters of a line in a message
Files = list[tuple[Path, dict[str, Any]]]  # with their own values, without those of `defaults`


def parse_yaml(text: str, where: str) -> Any:
    """Value of one YAML document. `where` names it in errors. Raises ConfigError with the line."""
    try:
        return unshared(YAML(typ="safe", pure=True).load(text))
    except RecursionError as error:
        raise ConfigError.of(where, text[:40], "is nested too deep, or within itself by an alias") from error
    except MarkedYAMLError as error:
        number, line = _place_of(error, text)
        # Of a key that stands twice it would name values that are not read yet: they are empty.
        problem = str(error.problem).partition(" with value ")[0]
        raise ConfigError.of(f"{where}:{number}", line[:_QUOTED], f"not valid YAML: {problem}") from error
    except (YAMLError, ValueError) as error:
        raise ConfigError.of(where, text[:40], f"not valid YAML: {' '.join(str(error).split())}") from error


def _place_of(error: MarkedYAMLError, text: str) -> tuple[int, str]:
    """Number, from 1, and text of the line with an error; of one at the end of the text, where what is open begins."""
    lines = text.rstrip().splitlines() or [""]
    numbers = [mark.line for mark in (error.problem_mark, error.context_mark) if mark is not None]
    number = next((number for number in numbers if number < len(lines)), len(lines) - 1)
    return number + 1, lines[number].rstrip()


def has_comment(text: str) -> bool:
    """Whether a part of `text`, one YAML document, is a comment; False where it is not valid YAML."""
    try:
        tokens = list(YAML(typ="safe", pure=True).scan(text))
    except YAMLError:
        return False
    return any("#" in text[a.end_mark.index : b.start_mark.index] for a, b in pairwise(tokens))


def unshared(value: Any) -> Any:
    """A copy with no map or list at two places, as an alias of YAML puts it there: an override changes one place."""
    if isinstance(value, dict):
        return {key: unshared(inner) for key, inner in value.items()}
    return [unshared(inner) for inner in value] if isinstance(value, list) else value


def deep_merge(base: Any, over: Any) -> Any:
    """`base` with `over` on top: maps merge key by key, everything else is replaced, also lists, and by a map that is
    empty below a key. Mutates nothing.
    """
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return base | {key: deep_merge(base.get(key), value) if value else value for key, value in over.items()}


def read_config_file(
    path: Path, root: type[BaseModel] | None = None, chain: tuple[Path, ...] = (), files: Files | None = None
) -> dict[str, Any]:
    """The mapping in `path` over those it names in `defaults:` (relative to the file, later ones win).

    With the class of its `root` other relative paths stand in it as `InFile`. `chain` holds the files being read above
    this one, to refuse cycles; `files` gets each file that was read, later ones win. Raises ConfigError.
    """
    resolved = Path(os.path.realpath(path))  # unlike Path.resolve it takes links in a circle
    if resolved in chain:
        cycle = " -> ".join(p.name for p in (*chain, resolved))
        raise ConfigError.of(DEFAULTS_KEY, str(path), f"files may not inherit in a circle: {cycle}")
    own = _read_mapping(path, chain)
    names = own.pop(DEFAULTS_KEY, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError.of(f"{path}: {DEFAULTS_KEY}", names, "must be a list of YAML files")
    merged: dict[str, Any] = {}
    for name in names:
        inherited = read_config_file(path.parent / os.path.expanduser(name), root, (*chain, resolved), files)
        merged = deep_merge(merged, inherited)
    if files is not None:
        files.append((path, own))
    return deep_merge(merged, own if root is None else mark_paths(own, root, path))


def file_with(field: str, files: Files) -> Path | None:
    """The last of the files that were read in which a value stands at a dotted path; None: it stands in none."""
    return next((path for path, values in reversed(files) if _stands_in(values, field)), None)


def _stands_in(node: Any, field: str) -> bool:
    """Whether `node` has a value at a dotted path; a key may have dots of its own."""
    if isinstance(node, list):
        node = dict(enumerate(node))
    if not isinstance(node, dict):
        return False
    return field in map(str, node) or any(
        _stands_in(inner, field.removeprefix(f"{key}.")) for key, inner in node.items() if field.startswith(f"{key}.")
    )


def _read_mapping(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    origin = f" (named in {DEFAULTS_KEY} of {chain[-1].name})" if chain else ""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError.of("config file", str(path), f"{no_such_file(path)}{origin}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of("config file", str(path), f"cannot be read{origin}: {error}") from error
    value = parse_yaml(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError.of(str(path), type(value).__name__, "must be a mapping of sections")
    return value
