"""Texts of a configuration, and of rows of data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_tlt.config.base import Section
from megatron_tlt.errors import ConfigProblem, Problems

_SWITCHES = ("yes", "no", "on", "off", "true", "false")


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
