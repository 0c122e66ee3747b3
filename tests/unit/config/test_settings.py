"""The number of settings, and that each is set in a file people start from or described beside the generated page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from megatron_tlt.config.root import Config
from megatron_tlt.config.schema import element_of, section_of
from megatron_tlt.config.yaml_reader import parse_yaml
from tests.helpers.mpi import ROOT

MOST = 218
# By `tools/`, from the code: that a setting stands there says nothing.
GENERATED = {"config.md", "recipes.md", "results.md"}
Setting = tuple[str, str]  # class and field: a section that stands at two places has its settings once


def settings(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, Setting]]:
    """Path and setting of every leaf, those of a list's elements without an index."""
    for name, field in model.model_fields.items():
        at = f"{path}{name}"
        inner = section_of(field.annotation) or section_of(element_of(field.annotation))
        if inner is None:
            yield at, (model.__name__, name)
        else:
            yield from settings(inner, f"{at}.")


def set_in(tree: Any, path: str = "") -> Iterator[str]:
    """Paths of the values in a file."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from set_in(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list):
        for value in tree:
            yield from set_in(value, path)
    if path:
        yield path


def test_there_are_few_settings() -> None:
    """A setting that no configuration sets is a constant: its page is shorter without it."""
    assert len(list(settings(Config))) <= MOST


def test_every_setting_is_set_or_described() -> None:
    """In a file of configs/ or examples/ or a YAML block, or on a page, by its name with its section's."""
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), ROOT / "README.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages if page.name not in GENERATED)
    files = [file for folder in ("configs", "examples") for file in ROOT.glob(f"{folder}/**/*.yaml")]
    trees = [*(file.read_text(encoding="utf-8") for file in files), *re.findall(r"```yaml\n(.*?)```", text, re.S)]
    values = {path for tree in trees for path in set_in(parse_yaml(tree, "a file"))}
    words = {re.sub(r"\.\d+", "", word) for word in re.findall(r"[\w.]*\w", text)}
    named = {word.split(".", dots)[-1] for word in words for dots in range(word.count("."))}
    places: dict[Setting, set[str]] = {}
    for path, setting in settings(Config):
        places.setdefault(setting, set()).update((path, ".".join(path.split(".")[-2:])))
    assert [sorted(names) for names in places.values() if not names & (values | named)] == []
