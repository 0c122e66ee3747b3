"""A run's chat template, stop strings and reward patterns against its tokenizer's files. Imports no `transformers`.

`check` and every start call it; a tokenizer that is not on this machine is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from megatron_tlt.config.root import Config, TrainingConfig
from megatron_tlt.data.chat import Messages, with_system
from megatron_tlt.data.chat_template import ChatTemplate, TemplateSettings
from megatron_tlt.data.special_tokens import pattern_problem, special_tokens_of, stop_problems
from megatron_tlt.errors import CheckpointError, ConfigProblem, DataError, shortened
from megatron_tlt.trainer.chat_settings import template_settings
from megatron_tlt.types import Prompt

# Renders a prompt with tools. Raises DataError.
Renderer: TypeAlias = Callable[[str | Messages, Sequence[dict[str, Any]]], str]


def chat_problems(config: TrainingConfig) -> list[ConfigProblem]:
    """A chat template that cannot be used, variables without one, and special tokens in stop strings and patterns."""
    directory, rl = _directory(config), config.rl
    if directory is None:
        return []
    try:
        problems = [] if rl is None else _special_token_problems(rl, directory)
    except CheckpointError as error:
        problems = [ConfigProblem("model.tokenizer", str(directory), str(error))]
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


def _open_template(
    directory: Path, fields: tuple[str, str], given: TemplateSettings
) -> tuple[ChatTemplate | None, list[ConfigProblem]]:
    """The chat template in `directory`; None without one that can be used, and problems where one is needed.

    `fields`: of the template's use and of its variables.
    """
    try:
        template = ChatTemplate.read(directory, given)
        if template is not None:
            template.variables()
    except CheckpointError as error:
        return None, [ConfigProblem(fields[0], True, f"needs a template that can be used: {error}")]
    if template is None and given.kwargs:
        return None, [ConfigProblem(fields[1], given.kwargs, f"needs a chat template, and {directory} has none")]
    return template, []


def generation_chat_problems(
    model: Path, chat: bool, kwargs: dict[str, Any], stops: Sequence[str]
) -> list[ConfigProblem]:
    """A chat template that `generate --chat` cannot use, and special tokens in stop strings."""
    if not model.is_dir():
        return []
    fields = "--chat", "--chat-template-kwargs"
    template, problems = _open_template(model, fields, TemplateSettings(kwargs)) if chat else (None, [])
    if chat and template is None and not problems:
        problems = [ConfigProblem("--chat", True, f"needs a chat template, and {model} has none")]
    try:
        return [*problems, *stop_problems("--stop", stops, special_tokens_of(model) if stops else frozenset())]
    except CheckpointError as error:
        return [*problems, ConfigProblem("--model", str(model), str(error))]


def plain_prompt_warning(model: Path, prompts: Sequence[Prompt]) -> str | None:
    """A warning of prompts that a model with a chat template gets as plain text. Looks at the first text; one with a
    special token is a rendered conversation.
    """
    text = next((prompt.text for prompt in prompts if prompt.text), None)
    try:
        if text is None or ChatTemplate.read(model) is None or any(t in text for t in special_tokens_of(model)):
            return None
    except CheckpointError:  # nothing reads the template here
        return None
    return f"the tokenizer of {model} has a chat template, and the prompts are plain text: --chat puts them into it"


def chat_warnings(config: TrainingConfig) -> list[str]:
    """Variables that the run's chat template does not read, and a template in a file that tokenizers do not read.

    For a configuration without problems.
    """
    directory = _directory(config)
    name, section = config.chat_name, config.chat
    if directory is None or not section.chat_template:
        return []
    of_processor = directory / "chat_template.json"
    if of_processor.is_file() and ChatTemplate.read(directory) is None:
        return [(f"{of_processor} is read for processors of images only, so prompts have no chat template; "
                "its text in chat_template.jinja would be used")]  # fmt: skip
    return unread_warnings(directory, f"{name}.chat_template_kwargs", section.chat_template_kwargs)


def unread_tools(config: Config, tools: Sequence[dict[str, Any]]) -> str | None:
    """A warning of an environment's tools that the chat template does not show to the model."""
    directory = _directory(config)
    template = ChatTemplate.read(directory) if tools and directory is not None and config.data.chat_template else None
    if template is None or "tools" in template.variables():
        return None
    names = shortened([tool["function"]["name"] for tool in tools])
    return f"env: the chat template in {directory} does not read 'tools', so no prompt says that there are {names}"


def unread_warnings(directory: Path, field: str, kwargs: dict[str, Any]) -> list[str]:
    """A line for each of `kwargs` that the chat template in `directory` does not read."""
    template = ChatTemplate.read(directory) if kwargs else None
    if template is None:
        return []
    read, lines = template.variables(), []
    for key in sorted(kwargs.keys() - read):
        close = get_close_matches(key, read, n=1)
        hint = f"; it reads {close[0]!r}" if close else ""
        lines.append(f"{field}: the chat template in {directory} does not read {key!r}, which changes nothing{hint}")
    return lines


def prompt_renderer(config: TrainingConfig) -> tuple[Renderer | None, list[ConfigProblem]]:
    """Renders prompts as the run will; None without a chat template here, or with one that cannot be used, and why."""
    directory = _directory(config)
    name, section = config.chat_name, config.chat
    if directory is None or not section.chat_template:
        return None, []
    fields = f"{name}.chat_template", f"{name}.chat_template_kwargs"
    template, problems = _open_template(directory, fields, template_settings(config))
    if template is None:
        return None, problems
    system = None if config.rl is None else config.rl.data.system_prompt

    def render(prompt: str | Messages, tools: Sequence[dict[str, Any]] = ()) -> str:
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        return template.render(with_system(messages, system), tools)

    return render, []


def _special_token_problems(config: Config, directory: Path) -> list[ConfigProblem]:
    stops = config.rollout.stop
    functions = config.rewards.functions
    patterns = {f"rewards.functions.{i}.pattern": f.pattern for i, f in enumerate(functions) if f.pattern is not None}
    if not (stops or patterns):
        return []
    special = special_tokens_of(directory)
    found = [pattern_problem(field, pattern, special) for field, pattern in patterns.items()]
    return [*stop_problems("rollout.stop", stops, special), *(problem for problem in found if problem is not None)]


def _directory(config: TrainingConfig) -> Path | None:
    """The tokenizer's directory, if it is on this machine."""
    directory = Path(config.model.tokenizer_path)
    return directory if directory.is_dir() else None
