"""The tools of a class: its public methods, their JSON schemas, and what cannot be a tool."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property, partial, partialmethod
from typing import Any

from pydantic import ValidationError, validate_call

from megatron_tlt.envs.base import ToolSchema
from megatron_tlt.errors import EnvError
from megatron_tlt.workers.user_code import not_plain

# Methods of a class of tools that are none, and what they are called with.
HOOKS: dict[str, tuple[str, ...]] = {
    "reset": ("prompt", "seed"),
    "begin_turn": (),
    "score": ("response",),
    "close": (),
}
_EXAMPLES = {"string": "1 + 1", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}
# Errors of a made-up value that another value of the schema's type would not have: pydantic's names end so.
_OF_TYPES = ("_type", "_parsing", "_required", "_argument", "missing", "is_instance_of", "literal_error", "enum")


def tool_names(owner: type) -> list[str]:
    """The public methods of a class and of its bases, in the order of their sources, without `HOOKS`.

    Raises EnvError naming one that no call of the model can reach.
    """
    names = dict.fromkeys(name for base in reversed(owner.__mro__[:-1]) for name in vars(base))
    public = [name for name in names if not name.startswith("_") and name not in HOOKS]
    return [name for name in public if _is_tool(owner, name)]


def _is_tool(owner: type, name: str) -> bool:
    """Whether an attribute is a method; classes and values are none. Raises EnvError."""
    value = inspect.getattr_static(owner, name)
    if isinstance(value, classmethod | partialmethod | partial):
        raise EnvError(f"tool {owner.__name__}.{name}: is a {type(value).__name__}, which is no tool: make it a method")
    if isinstance(value, type | property | cached_property) or not callable(value):
        return False
    if not inspect.isroutine(value):
        raise EnvError(f"tool {owner.__name__}.{name}: is a {type(value).__name__}, which is no tool: make it a method")
    return True


def check_plain(owner: type, name: str, *arguments: str, **named: str) -> None:
    """Raises EnvError for a method of a class that is async or a generator, or cannot be called with `arguments` and
    `named` ones, or names one of `arguments` in another's place.
    """
    method = getattr(owner, name)
    if (kind := not_plain(method)) is not None:
        raise EnvError(f"{owner.__name__}.{name}: is {kind}: must return its value")
    has_owner = not isinstance(inspect.getattr_static(owner, name), staticmethod | classmethod)
    given = ", ".join([*arguments, *(f"{key}={word}" for key, word in named.items())])
    try:
        signature = inspect.signature(method)
        signature.bind(*[None] * has_owner, *arguments, **named)
    except TypeError as error:
        raise EnvError(f"{owner.__name__}.{name}: must be callable as {name}({given}): {error}") from None
    except ValueError:  # no signature: of C
        return
    for place, (expected, found) in enumerate(zip(arguments, [*signature.parameters][has_owner:], strict=False), 1):
        if found != expected and found in arguments:
            raise EnvError(f"{owner.__name__}.{name}: is called as {name}({given}), but {found!r} is argument {place}")


def tool_schemas(owner: type) -> list[ToolSchema]:
    """The JSON schema of every tool of a class, from its signature and docstring (Google style, "Args:").

    Raises EnvError naming the method that lacks a type, a docstring or a parameter's description, that no call of the
    model can satisfy, or whose answer would be no text; also for a method of `HOOKS` with other parameters.
    """
    names = tool_names(owner)
    for hook, arguments in HOOKS.items():
        if hasattr(owner, hook):
            check_plain(owner, hook, *arguments)
    if not names:
        raise EnvError(f"{owner.__name__} has neither step nor public methods, which would be tools")
    return [_schema(owner, name) for name in names]


def _schema(owner: type, name: str) -> ToolSchema:
    from transformers.utils import get_json_schema  # seconds

    method = getattr(owner, name)
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    try:
        bound = _signature_only(method, is_static=is_static)
        _check_parameters(method, bound)
        schema: ToolSchema = get_json_schema(bound)
        arguments = example_arguments(schema)
        validate_call(bound)(**arguments)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors() if e["type"].endswith(_OF_TYPES)]
        if wrong:
            why = f"its schema allows {arguments}, which its signature refuses: {'; '.join(wrong)}"
            raise EnvError(f"tool {owner.__name__}.{name}: {why}") from None
    except Exception as error:  # transformers' and pydantic's errors have no common class
        raise EnvError(f"tool {owner.__name__}.{name}: {error}") from error
    return schema


def _check_parameters(method: Callable[..., Any], bound: Callable[..., Any]) -> None:
    """Raises EnvError for what no call by names can give, and for an answer that is no text."""
    if (kind := not_plain(method)) is not None:
        raise EnvError(f"is {kind}: must return its answer (asyncio.run waits for a coroutine)")
    for parameter in inspect.signature(bound).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise EnvError(f"{parameter} is a {parameter.kind.description} parameter: calls give arguments by name")


def _signature_only(method: Callable[..., Any], *, is_static: bool) -> Callable[..., Any]:
    """A function that does nothing, with the signature that a caller of the bound method sees. Raises EnvError."""

    def bound(**_: Any) -> None:
        """Only its signature is read."""

    signature = inspect.signature(method)
    parameters = [*signature.parameters.values()]
    if not is_static and not parameters:
        raise EnvError("has no parameter self: make it a staticmethod")
    bound.__signature__ = signature.replace(parameters=parameters if is_static else parameters[1:])  # type: ignore[attr-defined]
    bound.__annotations__ = dict(inspect.get_annotations(inspect.unwrap(method), eval_str=True))
    bound.__name__, bound.__doc__ = method.__name__, inspect.getdoc(method)
    bound.__module__ = method.__module__
    return bound


def example_arguments(tool: ToolSchema) -> dict[str, Any]:
    """A made-up value for each parameter of a tool."""
    properties: dict[str, Any] = tool["function"]["parameters"]["properties"]
    return {name: _example(schema) for name, schema in properties.items()}


def _example(schema: dict[str, Any]) -> Any:
    """A value of a schema as `transformers` makes them of types."""
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _example(schema["anyOf"][0])
    if "prefixItems" in schema:
        return [_example(item) for item in schema["prefixItems"]]
    kind = schema.get("type")
    return _EXAMPLES.get(kind[0] if isinstance(kind, list) else str(kind), "1")
