"""The calls in a turn of the model, in the forms that the parsers of vLLM and SGLang take.

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>       Qwen, Hermes; also other families' tags
    {"name": "add", "parameters": {"a": 1}}                             Llama 3: behind `<|python_tag|>`, text, or alone
    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]                Mistral, with or without the special token
    add{"a": 1}                                                         Mistral since 2025, alone in its turn
    <function=add><parameter=a>1</parameter></function>                 Qwen3-Coder
    [add(a=1)]                                                          Llama 3.2 and 4, the last lines of its turn

Calls within the model's thoughts are none. What looks like a call and is not read is one with a `problem`, which the
model gets as its answer.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_THOUGHT = r"(?:think|thinking|thought|thoughts|reasoning|seed:think)"
_THOUGHT_TAG = re.compile(rf"<(?P<close>/?){_THOUGHT}>|\[(?P<close_too>/?)THINK\]", re.IGNORECASE)
_TAG = re.compile(
    r"<(?P<name>tool_calls?|toolcall|function_?calls?)>|<\|(?:tool_call|python_tag|python_start)\|>|"
    r"<\|action_start\|>(?:<\|plugin\|>)?|\[TOOL_CALLS\]|\bfunctools(?=\[)|(?P<function><function=)",
    re.IGNORECASE,
)
_BETWEEN = re.compile(r"(?:[\s,;]|```(?:json|tool_call)?|\[TOOL_CALLS\])*")  # two objects, or a tag and its object
# Mistral since 2025: name{"a": 1}; GLM 4 with a line feed. Words before an object are none.
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\n?(?=\{[\s}\"])")
_WHOLE_PARAMETER = r"<parameter=[^>\s]+>(?:(?!<parameter=|<function=).)*?</parameter>"  # any other tag is its text
_FUNCTION = re.compile(
    rf"<function=([^>\s]+)>((?:\s*{_WHOLE_PARAMETER})*.*?)(?:</function>|(?=<function=|</tool_call>)|\Z)", re.DOTALL
)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_PYTHONIC = re.compile(r"^\[\s*[A-Za-z_][\w.]*\(\s*(?:\)|[A-Za-z_]\w*\s*=[^=])", re.MULTILINE)
_OBJECT = re.compile(r"""\{\s*["'}]""")
_LIKE_A_CALL = re.compile(
    r"""\{\s*['"](?:name|type|function)['"]\s*:.*['"](?:arguments|parameters)['"]\s*:""", re.DOTALL
)
# Forms of other families, and Llama's of its built-in tools.
_OTHER_FORM = re.compile(
    r"<(?:[\w:]+:|｜DSML｜)?(?:invoke|function|tool) name=|<arg_key>[^<]*</arg_key>|<tool_sep>|｜tool▁|"
    r"<\|?tool_calls?_|<\|tool_call|<tool_call>\s*[\w.-]+\s*(?:</tool_call>|[({\[])|<function_calls>\s*\w+\(|\[TOOL_CALLS\]\w|"
    r"<\|python_|\A\w+\.call\(|```tool_code|to=functions\.[\w.-]+\s*(?:<\||json|code|\{)|"
    r"\bfunctions\.[\w.-]+:\d+|^Action Input:|✿FUNCTION✿|<start_function_call>",
    re.MULTILINE,
)
_NAMES = ("name", "function", "tool", "tool_name", "action")
_INPUTS = ("args", "input", "kwargs", "params", "tool_input", "tool_args", "action_input")
_NO_INPUTS = {*_NAMES, "arguments", "parameters", "type", "id", "call_id", "tool_call_id", "index"}
_MOST_BROKEN = 200  # objects of a text that are no JSON: a model that repeats itself would take minutes
_FORM = '{"name": ..., "arguments": {...}}'
_CONSTANTS = {"true": True, "false": False, "null": None}  # JSON's, in a call of Python's form
_decoder = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a turn; `problem`: why it cannot be made."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    problem: str | None = None
    is_text: bool = False  # the arguments' values are texts, whatever their parameters are


def parse_calls(response: str, in_thought: bool = False) -> list[ToolCall]:
    """The calls of a turn, in order. `in_thought`: the chat template has opened a thought, which the turn may end."""
    text = without_thoughts(response, in_thought).strip()
    calls = _tagged(text) or _pythonic(text) or _named(text, 0)
    if not calls:
        other = _OTHER_FORM.search(text)
        calls = _bare(text if other is None else text[: other.start()])  # JSON behind it is an argument
        if not calls and other is not None:
            return [ToolCall(problem=f"calls of this form are not read: write <tool_call>{_FORM}</tool_call>")]
    return [*map(_encodable, calls)]


def _encodable(call: ToolCall) -> ToolCall:
    """The call, or an error for half of a surrogate pair, which JSON can write and no file or tokenizer takes."""
    try:
        json.dumps([call.name, call.arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return ToolCall(problem="a text of the call has half of a surrogate pair")
    return call


def without_thoughts(response: str, in_thought: bool = False) -> str:
    """What stands behind the last end of a thought, and before one that has no end.

    Tags in a call's arguments (in the strings of JSON objects, in parameters) are no ends and no beginnings.
    """
    tags = [*_THOUGHT_TAG.finditer(response)]
    if tags:
        spans = [(start, end) for start, end, value in _objects(response) if isinstance(value, dict)]
        spans += [found.span() for found in re.finditer(_WHOLE_PARAMETER, response, re.DOTALL)]
        tags = [tag for tag in tags if not any(start < tag.start() < end for start, end in spans)]
    ends = [tag.end() for tag in tags if tag["close"] or tag["close_too"]]
    if in_thought and not ends:
        return ""
    start = ends[-1] if ends else 0
    return response[start : next((tag.start() for tag in tags if tag.start() >= start), len(response))]


def _objects(text: str) -> Iterator[tuple[int, int, Any]]:
    """The JSON objects in a text that are not within others: begin, end, value. What looks like a call and is no JSON
    has the error for its value, and ends the text.
    """
    start, num_broken = _OBJECT.search(text), 0
    while start is not None and num_broken < _MOST_BROKEN:
        begin = start.start()
        try:
            value, end = _decoder.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            if _LIKE_A_CALL.match(text, begin):
                yield begin, len(text), error
                return
            end, num_broken = begin + 1, num_broken + (_MOST_BROKEN if isinstance(error, RecursionError) else 1)
        else:
            yield begin, end, value
        start = _OBJECT.search(text, end)


def _bare(text: str) -> list[ToolCall]:
    calls = []
    for _, _, value in _objects(text):
        if isinstance(value, Exception):
            calls.append(_no_json(value))
        elif _is_like_a_call(value):
            calls += _calls(value)
    return calls


def _is_like_a_call(value: dict[str, Any]) -> bool:
    if "tool_calls" in value or value.get("type") == "function":
        return True
    has_name = any(isinstance(value.get(name), str | dict) for name in _NAMES)
    return has_name and any(name in value for name in ("arguments", "parameters", *_INPUTS))


def _tagged(text: str) -> list[ToolCall]:
    """The calls behind tags. A tag without a call behind it is part of a text."""
    calls: list[ToolCall] = []
    tag = _TAG.search(text)
    while tag is not None:
        found, end = _behind(text, tag)
        calls += found
        tag = _TAG.search(text, max(end, tag.end()))
    return calls


def _behind(text: str, tag: re.Match[str]) -> tuple[list[ToolCall], int]:
    """The calls behind one tag, and the end of what was read."""
    if tag["function"]:
        function = _FUNCTION.match(text, tag.start())
        return ([], tag.end()) if function is None else ([_function(*function.groups())], function.end())
    if named := _named(text, tag.end()) if tag[0].startswith("[") else []:
        return named, len(text)
    calls: list[ToolCall] = []
    end = _next(text, tag.end())
    while text[end : end + 1] in ("{", "["):
        try:
            value, end = _decoder.raw_decode(text, end)
        except (ValueError, RecursionError) as error:
            if text[end] == "[" and not calls and not re.match(r"\[\s*\{", text[end:]):
                return [], end  # words in brackets
            return [*calls, _no_json(error)], _end_of_tag(text, tag, end)
        calls += _calls(value)
        end = _next(text, end)
    rest = text[end : _end_of_tag(text, tag, end)].strip() if calls and tag["name"] else ""
    return ([ToolCall(problem=f"text behind the JSON of the call: {rest[:40]!r}")] if rest else calls), end


def _next(text: str, start: int) -> int:
    """Where something stands that only separates objects no more."""
    between = _BETWEEN.match(text, start)
    assert between is not None, "it matches the empty text"
    return between.end()


def _end_of_tag(text: str, tag: re.Match[str], start: int) -> int:
    """Where the next tag of the same name is, opening or closing; else the end of the text."""
    other = re.compile(rf"</?{tag['name']}>|{re.escape(tag[0])}", re.IGNORECASE).search(text, start)
    return len(text) if other is None else other.start()


def _named(text: str, start: int) -> list[ToolCall]:
    """Objects of arguments behind names, up to the end of the text; none where anything else stands between."""
    calls: list[ToolCall] = []
    while match := _NAMED.match(text, start):
        try:
            value, start = _decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError) as error:
            return [_no_json(error)]
        calls.append(_call({"name": match[1], "arguments": value}))
        start = _next(text, start)
    return calls if start >= len(text) else []


def _function(name: str, body: str) -> ToolCall:
    if body.strip().startswith("{"):
        return _call({"name": name, "arguments": body.strip()})
    if _PARAMETER.sub("", body).strip():
        return ToolCall(problem=f"{name}: its arguments must be <parameter=NAME>VALUE</parameter>")
    return ToolCall(name, dict(_PARAMETER.findall(body)), is_text=True)


def _pythonic(text: str) -> list[ToolCall]:
    text = re.sub(r"<\|python_(?:tag|start|end)\|>|^```\w*$", "", text, flags=re.MULTILINE)
    begin = _PYTHONIC.search(text)
    if begin is None:
        return []
    try:
        tree = ast.parse(text[begin.start() :].strip(), mode="eval").body
        return [_python_call(node) for node in (tree.elts if isinstance(tree, ast.List) else [tree])]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [ToolCall(problem=f"calls must be [name(argument=value, ...), ...]: {error}")]


def _python_call(node: ast.expr) -> ToolCall:
    """Raises ValueError for anything else, and for arguments without a name."""
    if not isinstance(node, ast.Call):
        raise ValueError(f"{ast.unparse(node):.40} is none")
    if node.args or any(word.arg is None for word in node.keywords):
        raise ValueError("arguments need names")
    return ToolCall(ast.unparse(node.func), {str(word.arg): _value(word.value) for word in node.keywords})


def _value(node: ast.expr) -> Any:
    """A value that JSON has, in its form or Python's. Raises ValueError."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(item) for key, item in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(number := _value(node.operand), int | float)
    ):
        return -number
    raise ValueError(f"{ast.unparse(node):.40} is no value of JSON")


def _key(node: ast.expr | None) -> str | int:
    """Raises ValueError for what no object of JSON can have; numbers are for a tool's own mappings."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int):
        return node.value
    raise ValueError(f"{'**' if node is None else ast.unparse(node):.40} is no key of JSON")


def _calls(value: Any) -> list[ToolCall]:
    """Of a JSON value: a call, a list of calls, or a message with them."""
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    return [_call(item) for item in value] if isinstance(value, list) else [_call(value)]


def _call(value: Any) -> ToolCall:
    """The call in a JSON value: also within `{"type": "function", "function": {...}}`, and with arguments as a text."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return ToolCall(problem=f"a call must be {_FORM}")
    name = value.get("name", value.get("function"))
    given = [value[key] for key in ("arguments", "parameters") if value.get(key) is not None]
    arguments = given[0] if given else {}
    if isinstance(arguments, str):  # as OpenAI's messages have them
        try:
            arguments = json.loads(arguments or "{}") or {}
        except (ValueError, RecursionError) as error:
            return _no_json(error)
    has_others = any(value.get(key) for key in _INPUTS) or not (given or value.keys() <= _NO_INPUTS)
    if not isinstance(arguments, dict) or not isinstance(name, str) or has_others:
        return ToolCall(problem=f"a call must be {_FORM}")
    return ToolCall(name, arguments)


def _no_json(error: Exception) -> ToolCall:
    return ToolCall(problem=f"the call is no JSON: {error}")
