"""Chat messages of a row: `[{"role": "system", "content": ...}, {"role": "user", "content": ...}, ...]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Messages: TypeAlias = tuple[dict[str, str], ...]

_ROLES = ("system", "user", "assistant", "tool")


def as_messages(value: Any) -> Messages:
    """Role and content of every message; other keys are left out. Raises ValueError for what is not a conversation."""
    messages = []
    for index, message in enumerate(value):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if role not in _ROLES or not isinstance(content, str):
            raise ValueError(f'message {index} must have a role ({", ".join(_ROLES)}) and a string as content')
        if message.get("tool_calls"):
            raise ValueError(f"message {index} has tool_calls: calls must be in content, as the model writes them")
        messages.append({"role": role, "content": content})
    if not any(message["role"] == "user" and message["content"] for message in messages):
        raise ValueError("no message of a user")
    return tuple(messages)


def as_prompt(messages: Messages) -> Messages:
    """The messages to respond to: without the response that a row for fine-tuning ends with."""
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def last_user_text(messages: Messages) -> str:
    """The content of the last user message: the prompt's text for logs and rewards."""
    return next(message["content"] for message in reversed(messages) if message["role"] == "user")


def with_system(messages: Messages, system: str | None) -> list[dict[str, str]]:
    """The messages after a system message, unless they begin with one of their own."""
    if system is None or messages[0]["role"] == "system":
        return [*messages]
    return [{"role": "system", "content": system}, *messages]
