"""Chat templates are rendered as `transformers` renders them; what a template cannot take is named."""

from __future__ import annotations

from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatron_tlt.data.chat import as_messages
from megatron_tlt.data.chat_template import TemplateSettings
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.errors import CheckpointError, DataError
from tests.helpers.chat_models import GPT_OSS, LLAMA3_2, PARTS_ONLY, PARTS_TOO, QWEN2_5, QWEN3, chat_model

SYSTEM, USER = {"role": "system", "content": " Be brief. "}, {"role": "user", "content": "One <&> 'two'?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "ü", "b": 1}}}
PARTS = {"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two?"}]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


BLOCKS = """{%- for m in messages %}{%- if loop.index > 9 %}{%- break %}{%- endif %}{{ m.content }}
  {% if true %}
  {{ tools | tojson(indent=2) }}
  {% endif %}
{%- endfor %}{{ range(3) | list }}"""


def rendered(directory: Path, messages: list[dict[str, Any]], tools: Any = (), **kwargs: Any) -> str:
    template = HFTokenizer(directory, template=TemplateSettings(kwargs, date(2026, 1, 2))).template
    assert template is not None
    return template.render(as_messages(messages), tools)


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ('{"a": "ü", "b": 1}', CALL["function"]["arguments"]),  # OpenAI's form
        ("", {}),
        ("[1]", "[1]"),
        ("{a: 1}", "{a: 1}"),
        (None, None),
    ],
)
def test_arguments_of_a_call_that_are_json_text_become_an_object(given: Any, seen: Any) -> None:
    def call(arguments: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "add", "arguments": arguments}}

    turn = {"role": "assistant", "content": None}
    _, message = as_messages([USER, {**turn, "tool_calls": [call(given), "add"]}])
    assert message == {**turn, "tool_calls": [call(seen), "add"]}


@pytest.mark.parametrize(
    ("template", "messages", "kwargs"),
    [
        (QWEN2_5, [SYSTEM, USER], {}),
        (QWEN2_5, [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {**USER, "role": "tool"}], {}),
        (QWEN3, [USER], {}),
        (QWEN3, [USER], {"enable_thinking": False}),
        (QWEN3, [USER, {"role": "assistant", "content": "3", "thinking": "1 + 2", "weight": 0.5}, USER], {}),
        (LLAMA3_2, [USER, {**USER, "role": "assistant"}, {**USER, "role": "ipython"}], {"date_string": "1 Jan"}),
        (LLAMA3_2, [{**USER, "role": "developer"}, USER], {"bos_token": "", "date_string": "1 Jan"}),
        (GPT_OSS, [{**USER, "role": "developer"}, USER], {"reasoning_effort": "high"}),
        (GPT_OSS, [USER, {"role": "assistant", "content": "3", "reasoning": "1 + 2"}, {**USER, "name": "u"}], {}),
        (PARTS_TOO, [SYSTEM, PARTS], {}),
        (PARTS_ONLY, [PARTS], {}),
        (BLOCKS, [USER], {}),
    ],
)
def test_a_conversation_is_rendered_as_by_transformers(
    template: str, messages: list[dict[str, Any]], kwargs: dict[str, Any], tmp_path: Path
) -> None:
    directory = chat_model(tmp_path / "m", template)
    theirs = AutoTokenizer.from_pretrained(str(directory))
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
        )
        assert rendered(directory, messages, tools or (), **kwargs) == expected
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **kwargs)
    assert HFTokenizer(directory, template=TemplateSettings(kwargs)).encode_chat(as_messages(messages)) == ids


def test_today_is_the_date_that_was_given(tmp_path: Path) -> None:
    directory = chat_model(tmp_path / "m", LLAMA3_2)
    assert "Today: 02 Jan 2026" in rendered(directory, [USER])
    now = HFTokenizer(directory).template
    assert now is not None
    assert datetime.now().strftime("%d %b %Y") in now.render([USER])


@pytest.mark.parametrize(
    ("template", "message", "text"),
    [
        (QWEN2_5, PARTS, "<|user|>One \ntwo?<|end|>"),  # concatenates texts: a list is a TypeError
        (QWEN3, PARTS, "<|user|>One \ntwo?<|assistant|>"),  # leaves out what is no text
        ("{% for m in messages %}{{ m.content }}{% endfor %}", PARTS, "One \ntwo?"),  # writes a list's repr
        (LLAMA3_2, {**PARTS, "role": "tool"}, '<|tool|>"One \\ntwo?"<|end|>'),  # writes JSON
        (PARTS_ONLY, USER, "<|user|>One <&> 'two'?"),  # goes through the characters of a text
    ],
)
def test_contents_have_the_form_that_the_template_reads(
    template: str, message: dict[str, Any], text: str, tmp_path: Path
) -> None:
    messages = [message] if message["role"] == "user" else [USER, {**USER, "role": "assistant"}, message]
    assert text in rendered(chat_model(tmp_path / "m", template), messages)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (QWEN3, [{**USER, "role": "developer"}, USER], "leaves out the text of messages with role 'developer'"),
        (QWEN2_5, [USER, {**USER, "role": "function"}], "leaves out the text of messages with role 'function'"),
        ("{{ messages[-1].content }}", [SYSTEM, USER], "leaves out the text of messages with role 'system'"),
        ("Solve it.", [USER], "leaves out the text of messages with role 'user'"),
        ("{% if false %}{{ messages }}{% endif %}", [USER], "renders no text"),
        ("\n{{ messages[0].content + 1 }}", [USER], "line 2: the chat template fails on messages of user: TypeError: "),
        ("{{ messages[0].nothing.more }}", [USER], "line 1: the chat template fails on messages of user: Undefined"),
        ("{{ 1 // 0 }}", [USER], "fails on messages of user: ZeroDivisionError"),
        ("{{ messages[0].__class__.mro() }}", [USER], "fails on messages of user: SecurityError"),
    ],
)
def test_what_a_template_cannot_take_is_named_with_its_file(
    template: str, messages: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    directory = chat_model(tmp_path / "m", template)
    with pytest.raises(DataError, match=message) as caught:
        rendered(directory, messages)
    assert str(directory / "chat_template.jinja") in str(caught.value)
    with pytest.raises(DataError):
        HFTokenizer(directory).encode_chat(as_messages(messages))


@pytest.mark.parametrize(
    ("template", "message"),
    [("{% if %}", "line 1: no Jinja template: "), ("{{ 'a' | no_filter }}", "no_filter"), ("  \n", "is empty")],
)
def test_a_template_that_cannot_be_used_at_all_is_named(template: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        rendered(chat_model(tmp_path / "m", template), [USER])


def test_templates_come_from_the_files_that_transformers_reads(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d {{ messages }}"}, {"name": "tool_use", "template": "t {{ tools }}"}]
    of_list = chat_model(tmp_path / "list", None, chat_template=named)
    of_text = chat_model(tmp_path / "text", None, chat_template="c {{ messages }}")
    files = chat_model(tmp_path / "files", "f {{ messages }}", chat_template="c {{ messages }}")
    (files / "additional_chat_templates").mkdir()
    (files / "additional_chat_templates/tool_use.jinja").write_text("u {{ tools }}{{ messages }}")
    neither = chat_model(tmp_path / "processor", None)
    (neither / "chat_template.json").write_text('{"chat_template": "p"}')
    for directory in (of_list, of_text, files, neither):
        theirs, ours = AutoTokenizer.from_pretrained(str(directory)), HFTokenizer(directory)
        assert ours.has_chat_template == (theirs.chat_template is not None)
        for tools in (None, TOOLS) if ours.has_chat_template else ():
            expected = theirs.get_chat_template(tools=tools)[0]
            template = ours.template
            assert template is not None
            assert template._texts[template._name(bool(tools))][0].startswith(expected)
    nameless = chat_model(tmp_path / "nameless", None, chat_template=named[1:])
    with pytest.raises(ValueError, match="no default"):
        AutoTokenizer.from_pretrained(str(nameless)).apply_chat_template([USER])
    with pytest.raises(CheckpointError, match="none of its chat templates is named 'default', only 'tool_use'"):
        HFTokenizer(nameless).encode_chat("hi")
