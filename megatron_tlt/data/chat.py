"""Chat messages of a row: `[{"role": "system", "content": ...}, {"role": "user", "content": ...}, ...]`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

# Role, content (a text, or parts {"type": "text", "text": ..}) and the other fields that a template may read.
Messages: TypeAlias = tuple[dict[str, Any], ...]

THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of one field; templates read the first two
_ROLES = ("system", "user", "assistant", "tool", "developer", "function", "ipython")


def as_messages(value: Any) -> Messages:
    """The messages of a conversation, without fields that are null or no JSON; arguments of calls are objects.

    Raises ValueError for anything else.
    """
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise ValueError(f"message {index} must have a role ({', '.join(_ROLES)})")
        content = _content(message, index)
        others = {str(k): v for k, v in message.items() if k not in ("role", "content") and _is_json(v)}
        if isinstance(calls := others.get("tool_calls"), list):
            others["tool_calls"] = [*map(_with_object, calls)]
        messages.append({"role": message["role"], "content": content, **others})
    if not any(message["role"] == "user" and text_of(message["content"]) for message in messages):
        raise ValueError("no message of a user")
    return tuple(messages)


def form_of(messages: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], ...]:
    """Roles, types of content and names of fields: a template takes conversations alike that differ in texts only."""
    return tuple((m["role"], type(m.get("content")).__name__, *sorted(m)) for m in messages)


def text_of(content: Any) -> str:
    """The text of a message: its parts are joined by line breaks; null, beside calls of tools, is an empty one."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())


def all_texts(prompt: str | Messages) -> str:
    """The texts of all messages, joined by line breaks."""
    return prompt if isinstance(prompt, str) else "\n".join(text_of(message["content"]) for message in prompt)


def as_prompt(messages: Messages) -> Messages:
    """The messages to respond to: without the response that a row for fine-tuning ends with."""
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def last_user_text(messages: Messages) -> str:
    """The text of the last user message: the prompt's text for logs and rewards."""
    return next(text_of(message["content"]) for message in reversed(messages) if message["role"] == "user")


def has_system(messages: Messages) -> bool:
    """Whether the messages begin with a system message."""
    return messages[0]["role"] in ("system", "developer")


def with_system(messages: Messages, system: str | None) -> list[dict[str, Any]]:
    """The messages after a system message, unless they begin with one of their own."""
    if system is None or has_system(messages):
        return [*messages]
    return [{"role": "system", "content": system}, *messages]


def _content(message: Mapping[str, Any], index: int) -> str | list[dict[str, str]] | None:
    """A text, or text parts; null beside calls of tools. Raises ValueError naming the kind of any other part."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError(f"message {index} must have a string, or a list of text parts, as content")
    parts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            allowed = 'only {"type": "text", "text": ..} is taken'
            raise ValueError(f"message {index} has a part of type {kind!r} in content: {allowed}")
        parts.append({"type": "text", "text": part["text"]})
    return parts


def _with_object(call: Any) -> Any:
    """A call of a tool with its arguments as an object, as vLLM gives it to templates.

    OpenAI's form has them as JSON text, which `arguments | tojson` of a template would encode once more. Other texts
    stay.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    text = function.get("arguments") if isinstance(function, Mapping) else None
    if function is None or not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _is_json(value: Any) -> bool:
    """Whether a value is one that JSON has, and not null."""
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and (v is None or _is_json(v)) for k, v in value.items())
    if isinstance(value, list):
        return all(v is None or _is_json(v) for v in value)
    return isinstance(value, str | int | float)
