"""Tools: the public methods of a class (`schemas`), called by the model (`calls`).

The calls of a turn run in their order, and their answers, a line each, are one observation. A turn without a call ends
the trajectory.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError, validate_call

from megatron_tlt.envs.base import Environment, NoTextError, Role, Step, kind_without_text
from megatron_tlt.envs.calls import ToolCall, parse_calls
from megatron_tlt.envs.schemas import tool_names
from megatron_tlt.types import Prompt
from megatron_tlt.workers.process import end_if_full


class ToolEnvironment(Environment):
    """An object whose public methods are tools. Of its own it may have

    `reset(prompt, seed)`, as an environment has; `begin_turn()`, called before the calls of a turn; `score(response) ->
    float`, the reward of the last turn; `close()`.
    """

    def __init__(self, tools: Any, role: Role = "tool", *, in_thought: bool = False):
        """`role`: of the message that answers become; `in_thought`: see `parse_calls`."""
        self._owner, self._role, self._in_thought = tools, role, in_thought
        self._tools = {name: validate_call(getattr(tools, name)) for name in tool_names(type(tools))}

    def reset(self, prompt: Prompt, seed: int) -> str | None:
        text: str | None = self._owner.reset(prompt, seed) if hasattr(self._owner, "reset") else None
        return text

    def step(self, response: str) -> Step:
        calls = parse_calls(response, self._in_thought)
        if not calls:
            score = self._owner.score(response) if hasattr(self._owner, "score") else 0.0
            return Step(reward=score, done=True)
        if hasattr(self._owner, "begin_turn"):
            self._owner.begin_turn()
        return Step("\n".join(self._answer(call) for call in calls), role=self._role)

    def close(self) -> None:
        if hasattr(self._owner, "close"):
            self._owner.close()

    def _answer(self, call: ToolCall) -> str:
        """What a call returns; its exception is its answer too. Raises NoTextError for an answer that is no value."""
        if call.problem is not None:
            return f"error: {call.problem}"
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: no tool {call.name!r}; there are: {', '.join(self._tools)}"
        arguments = call.arguments or {}
        failure = None
        try:
            value = tool(**(_typed(tool, arguments) if call.is_text else arguments))
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            return f"error: {call.name}: {'; '.join(problems)}"
        except Exception as error:  # noqa: BLE001  a user's tool may raise anything
            failure = f"error: {type(error).__name__}: {error}"
        if failure is not None:
            end_if_full(failure)
            return failure
        try:
            return value if isinstance(value, str) else json.dumps(_plain(value), ensure_ascii=False, default=_plain)
        except (NoTextError, TypeError, ValueError, RecursionError) as error:  # also keys that are no texts, and cycles
            raise NoTextError(f"tool {call.name} returned {error}: must be a text or what JSON has") from None


def _plain(value: Any) -> Any:
    """A tool's value as JSON has it, or its text. Raises NoTextError where it has none."""
    if value is None or isinstance(value, str | int | float | list | tuple | dict):
        return value
    if (kind := kind_without_text(value)) is not None:
        raise NoTextError(kind)
    if callable(getattr(value, "tolist", None)):  # arrays and their scalars
        return value.tolist()
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)


def _typed(tool: Callable[..., Any], texts: dict[str, str]) -> dict[str, Any]:
    """Texts as the values that they stand for in JSON, where the parameter takes none as a text; null before a text."""
    hints = get_type_hints(inspect.unwrap(tool))
    values: dict[str, Any] = dict(texts)
    for name, text in texts.items():
        is_null = text in ("null", "None")
        try:
            TypeAdapter(hints.get(name, str)).validate_python(None if is_null else text)
            values[name] = None if is_null else text
        except ValidationError:
            with suppress(ValueError, RecursionError):  # the call's own validation names it
                values[name] = text if is_null else json.loads(text)
    return values
