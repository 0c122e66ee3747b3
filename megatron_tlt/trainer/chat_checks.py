"""A run's chat template, stop strings and reward patterns against its tokenizer.

`check` and every start call it; a tokenizer that is not on this machine is not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from megatron_tlt.config.root import Config, SftSection, TrainingConfig
from megatron_tlt.data.chat import Messages, form_of, with_system
from megatron_tlt.data.chat_template import ChatTemplate
from megatron_tlt.data.completions import Completion, read_completions
from megatron_tlt.data.rendered_prompts import rendered_warning
from megatron_tlt.data.sources import errors_at
from megatron_tlt.data.special_tokens import stop_problems
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.data.turn_form import THOUGHT_BEGIN, opens_thought, read_turn_form
from megatron_tlt.errors import CheckpointError, ConfigProblem, DataError, shortened
from megatron_tlt.trainer.token_checks import tokenizer_here
from megatron_tlt.types import Prompt

# Renders a prompt with tools. Raises DataError.
Renderer: TypeAlias = Callable[[str | Messages, Sequence[dict[str, Any]]], str]


def chat_problems(config: TrainingConfig) -> list[ConfigProblem]:
    """A chat template that cannot be used, variables without one, and special tokens in stop strings."""
    tokenizer, rl = tokenizer_here(config), config.rl
    if tokenizer is None:
        return []
    problems = [] if rl is None else [*stop_problems("rollout.stop", rl.rollout.stop, tokenizer.special_tokens)]
    render, unusable = prompt_renderer(config)
    if render is not None and rl is not None and rl.data.train.path is None:
        try:
            render("Prompt.", ())  # tasks and environments have no rows to render
        except DataError as error:
            unusable = [ConfigProblem("data.chat_template", True, str(error))]
    if render is None and not unusable and rl is not None and rl.data.system_prompt is not None:
        allowed = "needs data.chat_template and a tokenizer that has a chat template"
        unusable = [ConfigProblem("data.system_prompt", rl.data.system_prompt, allowed)]
    return problems + unusable


def _usable_template(
    tokenizer: HFTokenizer, fields: tuple[str, str], kwargs: dict[str, Any]
) -> tuple[ChatTemplate | None, list[ConfigProblem]]:
    """The tokenizer's chat template; None without one that can be used, and problems where one is needed.

    `fields`: of the template's use and of its variables, which are `kwargs`.
    """
    template = tokenizer.template
    try:
        if template is not None:
            template.variables()
    except CheckpointError as error:
        return None, [ConfigProblem(fields[0], True, f"needs a template that can be used: {error}")]
    if template is None and kwargs:
        return None, [ConfigProblem(fields[1], kwargs, f"needs a chat template, and {tokenizer.name} has none")]
    return template, []


def generation_chat_problems(
    tokenizer: HFTokenizer, chat: bool, kwargs: dict[str, Any], stops: Sequence[str]
) -> list[ConfigProblem]:
    """A chat template that `generate --chat` cannot use, and special tokens in stop strings."""
    fields = "--chat", "--chat-template-kwargs"
    template, problems = _usable_template(tokenizer, fields, kwargs) if chat else (None, [])
    if chat and template is None and not problems:
        problems = [ConfigProblem("--chat", True, f"needs a chat template, and {tokenizer.name} has none")]
    return [*problems, *stop_problems("--stop", stops, tokenizer.special_tokens)]


def plain_prompt_warning(tokenizer: HFTokenizer, prompts: Sequence[Prompt]) -> str | None:
    """A warning of prompts that a model with a chat template gets as plain text. Looks at the first text; one with a
    special token is a rendered conversation.
    """
    text = next((prompt.text for prompt in prompts if prompt.text), None)
    if text is None or tokenizer.template is None or tokenizer.special_token_in(text) is not None:
        return None
    there = f"the tokenizer of {tokenizer.name} has a chat template"
    return f"{there}, and the prompts are plain text: --chat puts them into it"


def chat_warnings(config: TrainingConfig) -> list[str]:
    """Variables that the run's chat template does not read, reward patterns with texts that responses lack, and a
    tokenizer without a template that it reads.

    For a configuration without problems.
    """
    tokenizer = tokenizer_here(config)
    return [] if tokenizer is None else [*_template_warnings(config, tokenizer), *_pattern_warnings(config, tokenizer)]


def _template_warnings(config: TrainingConfig, tokenizer: HFTokenizer) -> list[str]:
    name, section = config.chat_name, config.chat
    if not section.chat_template:
        return []
    if tokenizer.template is None:
        of_processor = Path(tokenizer.name) / "chat_template.json"
        if of_processor.is_file():
            return [(f"{of_processor} is read for processors of images only, so prompts have no chat template; "
                    "its text in chat_template.jinja would be used")]  # fmt: skip
        what = f"{tokenizer.name} has no chat template: prompts are plain text"
        return [f"{what}; {name}.chat_template=false says that this is meant"]
    return unread_warnings(tokenizer, f"{name}.chat_template_kwargs", section.chat_template_kwargs)


def _pattern_warnings(config: TrainingConfig, tokenizer: HFTokenizer) -> list[str]:
    """Of reward patterns that name a special token, or the beginning of a thought that the chat template writes: texts
    of responses lack both. Plain search: such a pattern may do without the token.
    """
    functions = () if config.rl is None else config.rl.rewards.functions
    lacking = dict.fromkeys(tokenizer.special_tokens, "is a special token, which texts of responses lack")
    if opens_thought(read_turn_form(tokenizer, config.chat.chat_template).opening):
        lacking[THOUGHT_BEGIN] = (
            "is written by the chat template at the end of the prompt, so responses begin behind it"
        )
    found = []
    for i, function in enumerate(functions):
        text = re.sub(r"\\(\W)", r"\1", function.pattern or "")  # <\|end\|> names <|end|>
        token = max((token for token in lacking if token in text), key=len, default=None)
        if token is not None:
            why = f"{token!r} {lacking[token]}: a pattern that needs it never matches"
            found.append(f"rewards.functions.{i}.pattern: {why}")
    return found


def unread_tools(config: Config, tools: Sequence[dict[str, Any]]) -> str | None:
    """A warning of an environment's tools that the chat template does not show to the model."""
    tokenizer = tokenizer_here(config) if tools and config.data.chat_template else None
    why = None if tokenizer is None else unseen_tools(tokenizer)
    names = shortened([tool["function"]["name"] for tool in tools])
    return None if why is None else f"env: {why}, so no prompt says that there are {names}"


def unseen_tools(tokenizer: HFTokenizer) -> str | None:
    """Why prompts do not show tools where the chat template is wanted; None where they do."""
    if tokenizer.template is None:
        return f"the tokenizer of {tokenizer.name} has no chat template"
    return None if tokenizer.shows_tools else f"the chat template of {tokenizer.name} does not read 'tools'"


def row_warnings(
    tokenizer: HFTokenizer, source: str, remedy: str, prompts: Iterable[tuple[str, str | Messages]], has_tools: bool
) -> list[str]:
    """Of rows of `source` for which the chat template is wanted: tools that it does not show (`has_tools`: some row has
    them), and `prompts` (place, prompt) that are rendered already. `remedy`: how to go without the template.
    """
    why = unseen_tools(tokenizer) if has_tools else None
    found = [None if why is None else f"{source}: {why}, so prompts do not show those of its rows"]
    if tokenizer.has_chat_template:
        found.append(rendered_warning(prompts, tokenizer, source, remedy))
    return [*filter(None, found)]


def unread_warnings(tokenizer: HFTokenizer, field: str, kwargs: dict[str, Any]) -> list[str]:
    """A line for each of `kwargs` that the tokenizer's chat template does not read."""
    if tokenizer.template is None or not kwargs:
        return []
    read, lines = tokenizer.template.variables(), []
    for key in sorted(kwargs.keys() - read):
        close = get_close_matches(key, read, n=1)
        hint = f"; it reads {close[0]!r}" if close else ""
        unread = f"the chat template in {tokenizer.name} does not read {key!r}"
        lines.append(f"{field}: {unread}, which changes nothing{hint}")
    return lines


def prompt_renderer(config: TrainingConfig) -> tuple[Renderer | None, list[ConfigProblem]]:
    """Renders prompts as the run will; None without a chat template here, or with one that cannot be used, and why."""
    tokenizer, name, section = tokenizer_here(config), config.chat_name, config.chat
    if tokenizer is None or not section.chat_template:
        return None, []
    fields = f"{name}.chat_template", f"{name}.chat_template_kwargs"
    template, problems = _usable_template(tokenizer, fields, section.chat_template_kwargs)
    if template is None:
        return None, problems
    system = None if config.rl is None else config.rl.data.system_prompt

    def render(prompt: str | Messages, tools: Sequence[dict[str, Any]] = ()) -> str:
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        return template.render(with_system(messages, system), tools)

    return render, []


def unreadable_records(section: SftSection, render: Renderer | None) -> list[ConfigProblem]:
    """Files of records on this machine that cannot be read, or not be put into the chat template."""
    problems = []
    for field, path, split in section.files:
        try:
            if Path(path).exists():
                rows, places = read_completions(section, Path(path), split)
                if render is not None:
                    _render_each_form(render, rows, places)
        except DataError as error:
            problems.append(ConfigProblem(field, path, str(error)))
    return problems


def _render_each_form(render: Renderer, rows: Sequence[Completion], places: Sequence[str]) -> None:
    """Puts the first prompt of each form into the chat template. Raises DataError naming file and record."""
    first: dict[Hashable, int] = {}
    for index, row in enumerate(rows):
        first.setdefault((isinstance(row.prompt, str) or form_of(row.prompt), bool(row.tools)), index)
    for index in first.values():
        with errors_at(places[index]):
            render(rows[index].prompt, rows[index].tools)
