"""What an error and the page of settings say a setting may be is what pydantic accepts."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import Config, SftConfig
from megatron_tlt.config.schema import element_of, field_allowed, section_of
from megatron_tlt.config.sim import SimConfig
from megatron_tlt.errors import ConfigError

SIGNS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


def bounds(schema: Any) -> list[str]:
    """Every bound of a number in a JSON schema, also of alternatives and of items, as text."""
    if isinstance(schema, list):
        return [bound for part in schema for bound in bounds(part)]
    if not isinstance(schema, dict):
        return []
    own = [f"{SIGNS[key]} {value:g}" for key, value in schema.items() if key in SIGNS]
    return own + bounds(schema.get("anyOf")) + bounds(schema.get("items"))


def bounded_fields(model: type[BaseModel], at: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Path, field, bounds and whether it is a list, of every bounded setting below `model`."""
    for name, field in model.model_fields.items():
        path, element = (*at, name), element_of(field.annotation)
        inner, step = section_of(field.annotation) or section_of(element), (0,) if section_of(element) else ()
        if inner is not None:
            yield from bounded_fields(inner, (*path, *step))
            continue
        metadata = field.metadata
        schema = TypeAdapter(field.annotation).json_schema()
        own = [bound for m in metadata for bound in bounds_of_metadata(m)]
        if found := own + bounds(schema):
            yield path, field, found, element is not None


def bounds_of_metadata(constraint: Any) -> list[str]:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return [f"{sign} {getattr(constraint, a):g}" for a, sign in signs.items() if hasattr(constraint, a)]


def nested(path: tuple[str | int, ...], value: Any) -> Any:
    """A tree with one value."""
    for step in reversed(path):
        value = [value] if isinstance(step, int) else {step: value}
    return value


FIELDS = [(root, *field) for root in (Config, SftConfig, SimConfig) for field in bounded_fields(root)]


def test_every_bound_is_said():
    for root, path, field, found, is_list in FIELDS:
        with pytest.raises(ConfigError) as caught:
            build_config(nested(path, [-1e9] if is_list else -1e9), (), root)
        at = ".".join(map(str, path)) + ".0" * is_list
        said = next(problem.allowed for problem in caught.value.problems if problem.path == at)
        assert [bound for bound in found if bound not in said or bound not in field_allowed(field)] == [], at
