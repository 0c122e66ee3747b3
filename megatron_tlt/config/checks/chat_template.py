"""Variables that a run gives to its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_tlt.config.root import TrainingConfig
from megatron_tlt.errors import ConfigProblem, Problems

_RESERVED = {
    "messages": "the messages are those of the data",
    "conversation": "the messages are those of the data",
    "tools": "tools are those of the environment, or of the records' column",
    "add_generation_prompt": "prompts always end with the opening of the response",
    "continue_final_message": "prompts always end with the opening of the response",
    "chat_template": "the template is that of the tokenizer's directory (model.tokenizer)",
    "strftime_now": "chat_template_date sets the date",
    "raise_exception": "it is a function of every template",
    **dict.fromkeys(
        ("tokenize", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
         "padding", "truncation", "max_length", "sanitize_control_tokens"),
        "it is an argument of apply_chat_template and no variable of a template",
    ),
}  # fmt: skip


def check_chat_template(config: TrainingConfig) -> Problems:
    """`data.chat_template_kwargs`, or those of `sft`."""
    name, section = config.chat_name, config.chat
    needed = None if section.chat_template else f"{name}.chat_template: true"
    yield from check_template_kwargs(f"{name}.chat_template_kwargs", section.chat_template_kwargs, needed)


def check_template_kwargs(path: str, kwargs: Mapping[str, Any], needed: str | None) -> Problems:
    """Names that are no variables of the user's. `needed`: the setting without which no template is used."""
    if kwargs and needed is not None:
        yield ConfigProblem(path, dict(kwargs), f"needs {needed}")
    for key in kwargs:
        if key in _RESERVED:
            yield ConfigProblem(path, key, f"cannot be set: {_RESERVED[key]}")
        elif not key.isidentifier():
            yield ConfigProblem(path, key, "is no name of a variable")
