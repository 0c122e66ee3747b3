"""The allowed values of the configuration models, as text, for error messages and `docs/reference/config.md`."""

from __future__ import annotations

import types
from collections.abc import Iterator
from datetime import date
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_NAMES = {
    int: "integer", float: "number", str: "text", bool: "true or false", date: "date YYYY-MM-DD", Any: "any value"
}  # fmt: skip


def strip_optional(annotation: Any) -> tuple[Any, list[Any], bool]:
    """`(type, constraints, may be null)` of an annotation such as `Annotated[int, Gt(0)] | None`.

    Of a pydantic `Field` the constraints are those that it holds.
    """
    constraints: list[Any] = []
    optional = False
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *more = get_args(annotation)
            constraints += [c for given in more for c in (given.metadata if isinstance(given, FieldInfo) else [given])]
        elif get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation):
            rest = tuple(a for a in get_args(annotation) if a is not type(None))
            annotation, optional = Union[rest], True  # noqa: UP007 - built at run time
        else:
            return annotation, constraints, optional


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The model class an annotation stands for, or None."""
    plain, _, _ = strip_optional(annotation)
    return plain if isinstance(plain, type) and issubclass(plain, BaseModel) else None


def element_of(annotation: Any) -> Any:
    """Element type of a tuple or list annotation, or None."""
    plain, _, _ = strip_optional(annotation)
    return get_args(plain)[0] if get_origin(plain) in (tuple, list) else None


def _range_text(constraints: list[Any]) -> str:
    signs = ((Gt, "gt", ">"), (Ge, "ge", ">="), (Lt, "lt", "<"), (Le, "le", "<="))
    parts = [
        f"{sign} {getattr(c, attribute)}" for cls, attribute, sign in signs for c in constraints if isinstance(c, cls)
    ]
    return " and ".join(parts)


def allowed_text(annotation: Any, metadata: tuple[Any, ...] | list[Any] = ()) -> str:
    """The values an annotation accepts: `integer > 0`, `one of 'fp32', 'bf16'`, `list of sections`."""
    plain, constraints, optional = strip_optional(annotation)
    constraints += metadata
    empty = "non-empty " if any(isinstance(c, MinLen) for c in constraints) else ""
    origin = get_origin(plain)
    if origin is Literal:
        choices = get_args(plain)
        text = ("one of " if len(choices) > 1 else "") + ", ".join(f"'{a}'" for a in choices)
    elif origin in (Union, types.UnionType):
        text = " or ".join(allowed_text(a) for a in get_args(plain))
    elif origin in (tuple, list):
        element = get_args(plain)[0]
        section = section_of(element)
        text = f"{empty}list of {section.__name__ if section else allowed_text(element)}"
    elif origin is dict or section_of(plain):
        text = "mapping"
    else:
        text = f"{empty}{_NAMES.get(plain, str(plain))} {_range_text(constraints)}".strip()
    return f"{text} or null" if optional else text


def field_allowed(field: FieldInfo) -> str:
    """`allowed_text` of a model field."""
    return allowed_text(field.annotation, field.metadata)


def paths_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Path of every section and setting below `model`, in the order of definition; of lists, those of element 0."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if (section := section_of(field.annotation)) is not None:
            yield from paths_of(section, f"{prefix}{name}.")
        if (element := section_of(element_of(field.annotation))) is not None:
            yield from paths_of(element, f"{prefix}{name}.0.")


def nearest_path(root: type[BaseModel], section: type[BaseModel], parent: str, key: str) -> str | None:
    """Full path of the valid name that `key`, found in `section` at `parent`, most likely meant; None without one.

    The section's own names come first, also in an element of a list; then those below it, then the whole tree's: of
    several with one name the first, at the root all that are one level down.
    """
    by_name: dict[str, list[str]] = {}
    for path in paths_of(root):
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    if own := get_close_matches(key, section.model_fields, n=1, cutoff=0.75):
        return f"{parent}.{own[0]}" if parent else own[0]
    inside = {n: under for n, paths in by_name.items() if (under := [p for p in paths if p.startswith(f"{parent}.")])}
    nearest = (names[near[0]] for names in (inside, by_name) if (near := get_close_matches(key, names, 1, 0.75)))
    if (found := next(nearest, None)) is None:
        return None
    below = [path for path in found if path.count(".") == 1]
    return " or ".join(below) if below and not parent else found[0]
