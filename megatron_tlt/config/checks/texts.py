"""Texts of a configuration, and of rows of data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from megatron_tlt.config.base import Section
from megatron_tlt.config.schema import strip_optional
from megatron_tlt.errors import ConfigProblem, Problems

_SWITCHES = ("yes", "no", "on", "off", "true", "false")
_NULLS = ("none", "null")  # in lower case, as other languages and quotes make them
_VARIABLE = re.compile(r"\$\{[^{}]*\}")  # of OmegaConf or a shell


def check_texts(value: object, path: str = "") -> Problems:
    """Strings, also within sections and lists, with a lone surrogate.

    Escapes of YAML and JSON and stray bytes of an argument become such ones; UTF-8 and tokenizers have none.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            found = f"\\u{ord(value[error.start]):04x} at character {error.start}"
            yield ConfigProblem(path, value, f"has a lone surrogate, {found}: must be UTF-8 text")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from check_texts(key, path)
            yield from check_texts(item, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from check_texts(item, f"{path}.{index}")


def check_nulls(section: Section, path: str = "") -> Problems:
    """Texts that were meant as no text: `None` of Python, or a variable that nothing replaces, in fields that may be
    null. A variable in a path is refused before.
    """
    for name, field in type(section).model_fields.items():
        value, at = getattr(section, name), f"{path}.{name}".lstrip(".")
        if isinstance(value, Section):
            yield from check_nulls(value, at)
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if isinstance(item, Section):
                    yield from check_nulls(item, f"{at}.{index}")
        elif isinstance(value, str) and strip_optional(field.annotation)[2]:
            if value.lower() in _NULLS:
                yield ConfigProblem(at, value, "is this text; for none write null, without quotes")
            elif _VARIABLE.fullmatch(value):
                yield ConfigProblem(at, value, "is a variable, which is not replaced: write the value, or null")


def switches_as_text(value: object, path: str = "", is_open: bool = False) -> Iterator[str]:
    """A note for each text in an open mapping of a section that looks like a switch: YAML 1.2 reads `no` as text, which
    is true in a template or in Python. `is_open`: `value` is in such a mapping.
    """
    if isinstance(value, str) and is_open and value.lower() in _SWITCHES:
        yield f"{path} = {value!r} is a text, not a switch: YAML's switches are true and false, without quotes"
    elif isinstance(value, Section):
        for name in type(value).model_fields:
            yield from switches_as_text(getattr(value, name), f"{path}.{name}".lstrip("."))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from switches_as_text(item, f"{path}.{key}", True)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from switches_as_text(item, f"{path}.{index}", is_open)
