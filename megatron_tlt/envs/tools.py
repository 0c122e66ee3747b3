"""Tools: the public methods of a class, called by the model in the forms of Qwen, Hermes and Llama 3.

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>   Qwen, Hermes; several in a turn
    {"name": "add", "parameters": {"a": 1, "b": 2}}                             Llama 3, alone in its turn

The calls of a turn run in their order, and their answers, a line each, are one observation. A turn without a call ends
the trajectory.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError, validate_call

from megatron_tlt.envs.base import Environment, Role, Step, ToolSchema
from megatron_tlt.errors import EnvError
from megatron_tlt.types import Prompt

_NOT_TOOLS = ("reset", "begin_turn", "close", "score")
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a turn; `problem`: why it cannot be made."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    problem: str | None = None


def parse_calls(response: str) -> list[ToolCall]:
    """The calls of a turn, in order."""
    if tagged := _TAGGED.findall(response):
        return [_call(body) for body in tagged]
    text = response.strip().removeprefix("<|python_tag|>").strip()
    if not (text.startswith("{") and '"name"' in text and ('"parameters"' in text or '"arguments"' in text)):
        return []
    decoder, calls = json.JSONDecoder(), []
    while text.startswith("{"):  # Llama 3 separates several by semicolons
        try:
            _, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            end = len(text)
        calls.append(_call(text[:end]))
        text = text[end:].lstrip("; \n")
    return calls


def _call(body: str) -> ToolCall:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"the call is no JSON: {error}")
    arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
    if isinstance(arguments, str):  # some models write the arguments as JSON in a string
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        return ToolCall(problem='a call must be {"name": ..., "arguments": {...}}')
    return ToolCall(call["name"], arguments)


def tool_names(owner: type) -> list[str]:
    """The public methods of a class, in the order of its source, without those of `_NOT_TOOLS`."""
    found = [name for base in reversed(owner.__mro__[:-1]) for name, value in vars(base).items() if callable(value)]
    return [name for name in dict.fromkeys(found) if not name.startswith("_") and name not in _NOT_TOOLS]


def tool_schemas(owner: type) -> list[ToolSchema]:
    """The JSON schema of every tool of a class, from its signature and docstring (Google style, "Args:").

    Raises EnvError naming the method that lacks a type, a docstring or a parameter's description.
    """
    from transformers.utils import get_json_schema  # seconds

    names = tool_names(owner)
    if not names:
        raise EnvError(f"{owner.__name__} has neither step nor public methods, which would be tools")
    schemas = []
    for name in names:
        method = getattr(owner, name)
        try:
            is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
            schemas.append(get_json_schema(method if is_static else _without_self(method)))
        except Exception as error:  # its errors have no common class
            raise EnvError(f"tool {owner.__name__}.{name}: {error}") from error
    return schemas


def _without_self(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the signature that a caller of the bound method sees."""

    def bound() -> None:
        """Only its signature is read."""

    signature = inspect.signature(method)
    bound.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
    bound.__annotations__ = dict(inspect.get_annotations(method, eval_str=True))
    bound.__name__, bound.__doc__ = method.__name__, inspect.getdoc(method)
    return bound


class ToolEnvironment(Environment):
    """An object whose public methods are tools. Of its own it may have

    `reset(prompt, seed)`, as an environment has; `begin_turn()`, called before the calls of a turn; `score(response) ->
    float`, the reward of the last turn; `close()`.
    """

    def __init__(self, tools: Any, role: Role = "tool"):
        """`role`: of the message that answers become."""
        self._owner, self._role = tools, role
        self._tools = {name: validate_call(getattr(tools, name)) for name in tool_names(type(tools))}

    def reset(self, prompt: Prompt, seed: int) -> str | None:
        text: str | None = self._owner.reset(prompt, seed) if hasattr(self._owner, "reset") else None
        return text

    def step(self, response: str) -> Step:
        calls = parse_calls(response)
        if not calls:
            score = self._owner.score(response) if hasattr(self._owner, "score") else 0.0
            return Step(reward=float(score), done=True)
        if hasattr(self._owner, "begin_turn"):
            self._owner.begin_turn()
        return Step("\n".join(self._answer(call) for call in calls), role=self._role)

    def close(self) -> None:
        if hasattr(self._owner, "close"):
            self._owner.close()

    def _answer(self, call: ToolCall) -> str:
        """What a call returns; its exception is its answer too."""
        if call.problem is not None:
            return f"error: {call.problem}"
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: no tool {call.name!r}; there are: {', '.join(self._tools)}"
        try:
            value = tool(**(call.arguments or {}))
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            return f"error: {call.name}: {'; '.join(problems)}"
        except Exception as error:  # noqa: BLE001  a user's tool may raise anything
            return f"error: {type(error).__name__}: {error}"
