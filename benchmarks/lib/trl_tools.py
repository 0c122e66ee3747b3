"""This project's tools in TRL: an `environment_factory`, and the policy's tokenizer with the template that TRL needs.

Calls are parsed by TRL, in Qwen's form; a call that is no JSON ends a trajectory there, and is answered here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from importlib import import_module
from typing import Any

from megatron_tlt.config.env import EnvSection
from megatron_tlt.envs.build import BUILT_IN, load_environment
from megatron_tlt.envs.schemas import tool_names

# As the demo policy's, whose messages of tools are the user's; TRL hands calls over as fields of a message.
TEMPLATE = """\
{% for message in messages %}\
{{ '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' + (message['content'] or '') }}\
{% for call in message['tool_calls'] or [] %}\
{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}{% endfor %}\
{{ '<|end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

# How transformers finds the calls in a turn.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|end\|>\s*", "content": "text"},
    },
}


def prepare_tokenizer(tokenizer: Any) -> None:
    """Sets both templates. Mutates."""
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE_TEMPLATE


def environment_class(section: EnvSection) -> type:
    """A class for TRL with the tools of a built-in environment. Answers are a run's, to calls that fail too."""
    assert section.kind is not None
    owner = getattr(import_module(f"megatron_tlt.envs.{section.kind}"), BUILT_IN[section.kind])
    make = load_environment(section)

    def tool_of(method: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(method)
        def tool(self: Any, **arguments: Any) -> str:
            call = json.dumps({"name": method.__name__, "arguments": arguments})
            return str(self._environment.step(f"<tool_call>{call}</tool_call>").observation)

        return tool

    def init(self: Any) -> None:
        self._environment = make()

    tools = {name: tool_of(getattr(owner, name)) for name in tool_names(owner)}
    return type(owner.__name__, (), {"__init__": init, "reset": lambda self, **row: None, **tools})
