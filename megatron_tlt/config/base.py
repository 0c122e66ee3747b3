"""The base of every configuration section: frozen, strict about names, documented by field docstrings."""

from __future__ import annotations

import math
import os
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from megatron_tlt.config.schema import strip_optional

Content = Literal["model", "companions", "drafter", "rows"]
_VARIABLE = re.compile(r"\$\w+|\$\{")
IN_WORDS = "in_words"  # type of an error whose message says what is allowed


@dataclass(frozen=True)
class FilePath:
    """Marks a field with a path, or with `path/to/file.py:name`: `paths` says what a relative one counts from.

    `~` is the home directory, as in a shell, which does not see those of YAML files and of `a.b=~/c`. A variable of a
    shell is refused: a run would go into a directory of that name.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(_whole_path, handler(source))


def _whole_path(path: str | None) -> str | None:
    """With the home directory in place of `~`. Raises PydanticCustomError for a variable of a shell."""
    if path is None:
        return None
    if found := _VARIABLE.search(path):
        allowed = f"has {found[0]!r}: variables are not replaced in a path; write it out"
        raise PydanticCustomError(IN_WORDS, "{allowed}", {"allowed": allowed})
    return os.path.expanduser(path)


def _of_json(given: Any) -> Any:
    """A value without a part that JSON would change on its way to workers or into config.json. Raises
    PydanticCustomError naming the first one.
    """
    why = next(_not_of_json(given, ""), None) if isinstance(given, dict) else None  # else: no mapping
    if why is not None:
        raise PydanticCustomError(IN_WORDS, "{allowed}", {"allowed": why})
    return given


def _not_of_json(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                yield f"the key {key!r}{place and f' of {place}'} must be a text: write it in quotes"
            yield from _not_of_json(item, f"{place}.{key}".lstrip("."))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_of_json(item, f"{place}.{index}")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{place} = {value} must be finite"
    elif not (value is None or isinstance(value, str | int | float)):
        yield f"{place} = {value} ({type(value).__name__}) must be a text, in quotes, or another value that JSON has"


OpenMapping: TypeAlias = Annotated[dict[str, Any], BeforeValidator(_of_json)]
"""A mapping whose keys are the user's, with values that JSON has."""


@dataclass(frozen=True)
class OnDisk(FilePath):
    """Marks a field with a file or directory that is read."""

    content: Content | None = None  # what is fetched where it names something on the hub; None: it cannot
    split: str = ""  # the section's field with the split of a data set
    is_read: Callable[[Any], object] = bool  # whether it is read, by its section
    words: tuple[str, ...] = ()  # values that are no paths


class Section(BaseModel):
    """One section of the configuration. A field's docstring is its documentation (`docs/reference/config.md`)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, given: Any) -> Any:
        """Python takes `true` for 1: as text it is refused with the field's name and range."""
        if not isinstance(given, dict):
            return given
        return {k: _booleans_as_text(v) if cls._takes_numbers(k) else v for k, v in given.items()}

    @classmethod
    def _takes_numbers(cls, name: Any) -> bool:
        kinds = [*_kinds(cls.model_fields[name].annotation)] if name in cls.model_fields else []
        return bool not in kinds and (int in kinds or float in kinds)


def _booleans_as_text(value: Any) -> Any:
    if isinstance(value, list):
        return [_booleans_as_text(item) for item in value]
    return str(value).lower() if isinstance(value, bool) else value


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types of a value, of its alternatives and of its items."""
    plain, _, _ = strip_optional(annotation)
    yield plain
    if get_origin(plain) in (Union, types.UnionType, tuple, list):
        for inner in get_args(plain):
            yield from _kinds(inner)


class Place(NamedTuple):
    """A field that is marked `OnDisk`, and its value."""

    field: str
    value: str
    section: Any
    mark: OnDisk


def places(section: Section, prefix: str = "") -> Iterator[Place]:
    """The files and directories that a configuration reads, and names on the hub in their stead."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from places(value, f"{prefix}{name}.")
        for mark in field.metadata:
            if isinstance(mark, OnDisk) and value not in (None, *mark.words) and mark.is_read(section):
                yield Place(prefix + name, value, section, mark)
