"""Texts of a configuration, and of rows of data."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_tlt.errors import ConfigProblem, Problems


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
