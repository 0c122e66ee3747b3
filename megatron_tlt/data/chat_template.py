"""The chat template of a tokenizer's directory, rendered as `transformers` renders it.

    chat_template.jinja                      "default"      } where one of these is there,
    additional_chat_templates/NAME.jinja     NAME           } the next line is not read
    tokenizer_config.json: chat_template     a text, or a list of {"name", "template"}

"tool_use" renders conversations with tools, "default" all others. Messages that a template refuses, fails on or leaves
out are named with its file and line, which `transformers` does not do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_tlt.config.json_reader import read_object_if_there
from megatron_tlt.data.chat import THOUGHTS, form_of, text_of
from megatron_tlt.errors import CheckpointError, DataError, shortened

_FILE, _FOLDER, _CONFIG = "chat_template.jinja", "additional_chat_templates", "tokenizer_config.json"
_MARKER = "m{}part{}end"  # stands for a text of a message
# What an expression of a template raises on messages of another form than its author had in mind.
_FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class TemplateSettings:
    """What a run gives to its chat template beside the messages."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    day: date | None = None  # shown as today; None: today


class ChatTemplate:
    """The templates of one tokenizer. Nothing is compiled before it is used."""

    def __init__(
        self,
        directory: Path,
        texts: Mapping[str, tuple[str, str]],
        named_tokens: Mapping[str, Any],
        given: TemplateSettings,
    ):
        """`texts`: (text, its place for messages) by name; `named_tokens`: "bos_token", .. for the template."""
        self._directory, self._texts, self._named_tokens, self._given = directory, texts, named_tokens, given
        self._compiled: dict[str, Template] = {}
        self._forms: dict[Hashable, str] = {}

    @classmethod
    def read(cls, directory: Path, named_tokens: Mapping[str, Any], given: TemplateSettings) -> ChatTemplate | None:
        """The templates of a directory; None without any. Raises CheckpointError for a file that cannot be read."""
        texts = _texts_of(directory)
        return cls(directory, texts, named_tokens, given) if texts else None

    def variables(self) -> frozenset[str]:
        """Names that the templates in use read and do not set themselves. Raises CheckpointError."""
        found: set[str] = set()
        for name in {self._name(has_tools) for has_tools in (False, True)}:
            environment = self._template(name).environment
            found |= meta.find_undeclared_variables(environment.parse(self._texts[name][0]))
        return frozenset(found)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]] = (), is_open: bool = True
    ) -> str:
        """The text of a conversation. `is_open`: with the opening of the response at its end.

        A text stands as one part where the template reads parts only; parts are joined by line breaks where it reads
        texts only. Raises CheckpointError for a template that cannot be used at all, DataError for messages that it
        refuses, fails on or leaves out.
        """
        return self._render(_in_form(messages, self._form(messages, tools)), tools, is_open)

    def _name(self, has_tools: bool) -> str:
        if has_tools and "tool_use" in self._texts:
            return "tool_use"
        if "default" not in self._texts:
            there = ", ".join(map(repr, sorted(self._texts)))
            raise CheckpointError(f"{self._directory}: none of its chat templates is named 'default', only {there}")
        return "default"

    def _template(self, name: str) -> Template:
        text, where = self._texts[name]
        if name not in self._compiled:
            if not text.strip():
                raise CheckpointError(f"{where}: the chat template is empty")
            try:
                self._compiled[name] = _environment().from_string(text)
            except TemplateSyntaxError as error:
                raise CheckpointError(f"{where}: line {error.lineno}: no Jinja template: {error.message}") from error
        return self._compiled[name]

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]], is_open: bool = True
    ) -> str:
        name = self._name(bool(tools))
        day = datetime.combine(self._given.day or date.today(), time())
        values = {
            "messages": [_with_thoughts(message) for message in messages],
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": is_open,
            "strftime_now": day.strftime,
        }
        template = self._template(name)
        with self._explained(messages, self._texts[name][1]):
            return template.render({**values, **self._named_tokens, **self._given.kwargs})

    @contextmanager
    def _explained(self, messages: Sequence[Mapping[str, Any]], where: str) -> Iterator[None]:
        """What a template raises, as DataError with its file."""
        try:
            yield
        except _FAILURES as error:
            roles = shortened([message["role"] for message in messages])
            if type(error) is TemplateError:  # `raise_exception` of the template itself
                raise DataError(f"{where}: the chat template refuses messages of {roles}: {error}") from error
            what = f"{_line_of(error)}the chat template fails on messages of {roles}"
            raise DataError(f"{where}: {what}: {type(error).__name__}: {error}") from error

    def _form(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        """In which form the template reads the texts of such messages: "given", "text" or "parts".

        Found by rendering other texts in messages of the same roles and fields, once for each such list. Raises
        DataError where a text does not arrive in any form.
        """
        has_parts = any(isinstance(message.get("content"), list) for message in messages)
        shape = form_of(messages), bool(tools)
        if shape in self._forms:
            return self._forms[shape]
        marked = [{**message, **_marked(i, message.get("content"))} for i, message in enumerate(messages)]
        first: DataError | None = None
        for form in ("given", "text" if has_parts else "parts"):
            try:
                rendered = self._render(_in_form(marked, form), tools)
            except DataError:  # other texts may be what the template fails on
                continue
            if not (absent := _absent(rendered, marked)):
                self._forms[shape] = form
                return form
            first = first or DataError(f"{self._texts[self._name(bool(tools))][1]}: {_left_out(rendered, absent)}")
        if first is not None:
            raise first
        return "text" if has_parts else "given"


def _texts_of(directory: Path) -> dict[str, tuple[str, str]]:
    files = {"default": directory / _FILE} if (directory / _FILE).is_file() else {}
    files |= {file.stem: file for file in sorted((directory / _FOLDER).glob("*.jinja"))}
    try:
        texts = {name: (file.read_text(encoding="utf-8"), str(file)) for name, file in files.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{directory}: a chat template cannot be read: {error}") from error
    if texts:
        return texts
    value = read_object_if_there(directory / _CONFIG).get("chat_template")
    where = f"{directory / _CONFIG}: chat_template"
    if isinstance(value, str):
        return {"default": (value, where)}
    if isinstance(value, dict):
        value = [{"name": name, "template": text} for name, text in value.items()]
    named = value if isinstance(value, list) else [] if value is None else [value]
    for entry in named:
        is_named = isinstance(entry, dict) and isinstance(entry.get("name"), str)
        if not (is_named and isinstance(entry.get("template"), str)):
            raise CheckpointError(f'{where} must be a text or a list of {{"name": .., "template": ..}}')
    return {entry["name"]: (entry["template"], f"{where} {entry['name']!r}") for entry in named}


class _Generation(Extension):
    """`{% generation %} .. {% endgeneration %}` marks turns of the assistant for masks; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as `transformers` sets it up for chat templates."""
    extensions = [_Generation, LoopControlExtension]
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    return made


def _raise(message: object) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without the escapes for HTML of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _line_of(error: BaseException) -> str:
    """The line of the template that raised, if Jinja names one."""
    line, frame = None, error.__traceback__
    while frame is not None:
        line = frame.tb_lineno if frame.tb_frame.f_code.co_filename == "<template>" else line
        frame = frame.tb_next
    return "" if line is None else f"line {line}: "


def _with_thoughts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its thoughts under the names that templates read, and without fields that are null."""
    fields = {name: value for name, value in message.items() if value is not None}
    thoughts = next((fields[name] for name in THOUGHTS if name in fields), None)
    return fields if thoughts is None else {"thinking": thoughts, **fields, "reasoning_content": thoughts}


def _in_form(messages: Sequence[Mapping[str, Any]], form: str) -> Sequence[Mapping[str, Any]]:
    if form == "given":
        return messages
    changed = []
    for message in messages:
        content = message.get("content")
        if form == "text" and isinstance(content, list):
            content = text_of(content)
        elif form == "parts" and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        changed.append({**message, "content": content})
    return changed


def _marked(index: int, content: Any) -> dict[str, Any]:
    """The content of message `index` with markers in place of its texts."""
    if isinstance(content, str):
        return {"content": _MARKER.format(index, 0)}
    if isinstance(content, list):
        return {"content": [{**part, "text": _MARKER.format(index, i)} for i, part in enumerate(content)]}
    return {}


def _absent(rendered: str, marked: Sequence[Mapping[str, Any]]) -> list[str]:
    """Roles of messages of which a marker is absent, or stands in the repr or the JSON of a part.

    Templates may leave out a text beside calls of tools.
    """
    text, roles = rendered.casefold(), []
    for message in marked:
        content = message.get("content")
        for part in [{"text": content}] if isinstance(content, str) else content or []:
            as_code = re.search(rf"""text['"]\s*:\s*['"]{part["text"]}""", text) and isinstance(content, list)
            if not message.get("tool_calls") and (part["text"] not in text or as_code):
                roles.append(message["role"])
                break
    return roles


def _left_out(rendered: str, roles: Sequence[str]) -> str:
    if not rendered.strip():
        return "the chat template renders no text"
    return f"the chat template leaves out the text of messages with role {', '.join(dict.fromkeys(map(repr, roles)))}"
