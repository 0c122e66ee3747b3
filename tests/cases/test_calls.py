"""Calls of tools as models of many families write them, in the forms of vLLM's and SGLang's parsers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.config.env import EnvSection
from megatron_tlt.envs.build import load_environment
from megatron_tlt.envs.calls import parse_calls

F, G = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "parameters": {"b": 2}}'
f, g = ("f", {"a": 1}), ("g", {"b": 2})


@pytest.mark.parametrize(
    ("response", "calls"),
    [
        # verl #4757, vllm PR #49923: a thought is no place of calls
        (f"<think>I might send <tool_call>{F}</tool_call> but I know it.</think> <answer>6</answer>", []),
        (f"<think>the words <tool_call> end it</think><tool_call>{G}</tool_call>", [g]),
        (f"<think>one {F}</think> <think>two <tool_call>{F}</tool_call>", []),
        (f"The prompt opened it: <tool_call>{F}</tool_call></think>\n{G}", [g]),
        (f"<think>so </think> and so <tool_call>{F}</tool_call> on </think>6", []),
        (f"[THINK]{F}[/THINK]6", []),
        ('<tool_call>{"name": "f", "arguments": {"a": "</think>", "b": "<think>"}}</tool_call>',
         [("f", {"a": "</think>", "b": "<think>"})]),
        ('<think>{"name": "f", "arguments": oh </think>' + G, [g]),
        # a tag counts only with a call behind it
        (f"The tag <tool_call> begins one: <tool_call>\n{F}\n</tool_call>", [f]),
        ("No <tool_call> and no </tool_call>, <tool_call></tool_call>: <answer>6</answer>", []),
        (f"<tool_call>{F}<tool_call>{G}</tool_call>", [f, g]),
        (f"<tool_call>\n```json\n{F}\n```\n</tool_call> {G}", [f]),
        (f"<tool_call>{F}\n{G}</tool_call>", [f, g]),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', [("f", {"a": "</tool_call>"})]),
        # Llama 3 (vLLM's llama3_json takes objects anywhere, SGLang's those behind the tag or at the beginning)
        (f"{F}, {G}", [f, g]),
        (f"<|python_tag|>{G}; {F}", [g, f]),
        (f"Here is the call: {G} and no more.", [g]),
        (f'{{"type": "function", "function": {F}}}', [f]),
        ('{"type": "function", "name": "g", "parameters": {"b": 2}}', [g]),
        ('{"name": "f", "arguments": null}', [("f", {})]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [f]),
        ('{"name": "f", "arguments": ""}', [("f", {})]),
        ('<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": "{}"}', [("f", {}), ("g", {})]),
        ('{"name": "f", "parameters": {"q": "a {b} [c] \\"d\\""}}', [("f", {"q": 'a {b} [c] "d"'})]),
        # Mistral (its tags are special tokens, which the text of a turn lacks), xLAM, Phi-4-mini, Granite, Nemotron
        (f"[TOOL_CALLS][{F}, {G}]", [f, g]),
        (f"[{F}, {G}]", [f, g]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}', [f, g]),
        ('f{"a": 1}', [f]),
        (f"functools[{F}]", [f]),
        (f"<|tool_call|>[{F}]", [f]),
        (f"<TOOLCALL>[{F}, {G}]</TOOLCALL>", [f, g]),
        (f'{{"tool_calls": [{{"type": "function", "function": {F}}}]}}', [f]),
        # Qwen3-Coder, Llama 3.1's own tags, Llama 4
        ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", [("f", {"a": "1"})]),
        ('<function=f>{"a": 1}</function>', [f]),
        ("[f(a=1), g(b=2)]", [f, g]),
        ("<|python_start|>[f(a=true)]<|python_end|>", [("f", {"a": True})]),
        ('[f(a=(1, -2.5, None), b={"x": [true, null]})]', [("f", {"a": [1, -2.5, None], "b": {"x": [True, None]}})]),
        ("I look it up:\n```python\n[f(a=1)]\n```", [f]),
        ("<tool_call><function=f><parameter=a>1</parameter></tool_call>", [("f", {"a": "1"})]),
        ("<tool_call><function=f><parameter=a>1\n</tool_call>", [("f", {"a": "1"})]),
        (f"<tool_call>{F}</tool_call><function=g></function>", [f, ("g", {})]),
        # arguments hold any text, also that of a call
        ("<function=f><parameter=a></function></think></parameter></function>", [("f", {"a": "</function></think>"})]),
        (f"<function=f><parameter=a><tool_call>{G}</tool_call></parameter></function>",
         [("f", {"a": f"<tool_call>{G}</tool_call>"})]),
        # InternLM, GLM 4
        (f"<|action_start|><|plugin|>\n{G}<|action_end|>", [g]),
        ('f\n{"a": 1}', [f]),
        # answers
        ("7", []),
        (r"$\{x\}$, \boxed{6} and [x(1)]", []),
        ('{"name": "Bob", "age": 3}', []),
        ('Result {"a": 1}', []),
        ("Use <invoke ..> or `<arg_key>`, to=functions.f in another form.", []),
        # errors to the model, in place of silence
        ("{'name': 'f', 'arguments': {'a': 1}}", "is no JSON"),
        ('Sure: {"name": "f", "arguments": {"a": 1}', "is no JSON"),
        ("<tool_call>{oops}</tool_call>", "is no JSON"),
        (f"<tool_call>{F} because</tool_call>", "text behind the JSON"),
        ('{"name": "f", "arguments": "a=1"}', "is no JSON"),
        ('{"name": "f", "arguments": [1]}', "a call must be"),
        ("<tool_call>[1]</tool_call>", "a call must be"),
        pytest.param('{"name": "f", "parameters": ' + "[" * 99_999, "is no JSON", id="deep"),
        ('{"tool": "f", "args": {"a": 1}}', "a call must be"),
        ('{"action": "f", "action_input": "x"}', "a call must be"),
        ("<tool_call>f(a=1)</tool_call>", "calls of this form are not read"),
        ('brave_search.call(query="x")', "of this form are not read"),
        ("[f(a=1)", "never closed"),
        ("[f(a=1), g(2)]", "arguments need names"),
        ("[f(a=1)] and so", "[f(a=1)] and so is none"),
        ("[f(a={1, 2})]", "{1, 2} is no value of JSON"),
        ("[f(a=[x])]", "x is no value of JSON"),  # not the node's address, which no other run repeats
        ("[f(a=b'x')]", "b'x' is no value of JSON"),
        ("[f(a={(1, 2): 3})]", "(1, 2) is no key of JSON"),
        ("[f(a={**b})]", "** is no key of JSON"),
        ('<tool_call>{"name": "f", "a": 1}</tool_call>', "a call must be"),
        (r'{"name": "f", "arguments": {"a": "\ud83d"}}', "half of a surrogate pair"),  # recorded, it ended the run
        (r"[f(a='\ud83d')]", "half of a surrogate pair"),
        ('f{"a": 1,}', "is no JSON"),
        ('[TOOL_CALLS]f[ARGS]{"a": 1', "is no JSON"),
        *((text, "calls of this form are not read") for text in (
            f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{G}</arg_value>\n</tool_call>",
            f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{G}<|tool_call_end|>",
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{G}\n```",
            'functions.f:0{"a": 1}',
            "<tool_call>f</tool_call>",
            '<｜DSML｜invoke name="f">',
            '<steptml:invoke name="f">',
            '<function name="f">',
            "<function_calls>\nf(a=1)\n</function_calls>",
            "```tool_code\nf(a=1)\n```",
            "Sure.<|python_start|>[f(a=1)]",
            '<|python_tag|>brave_search.call(query="x")',
            "Action: f\nAction Input: 1",
        )),
        ("<function=f>a is 1</function>", "<parameter=NAME>"),
    ],
)  # fmt: skip
def test_calls_are_those_of_the_families_parsers(response: str, calls: list[tuple[str, dict[str, Any]]] | str) -> None:
    found = parse_calls(response)
    if isinstance(calls, str):
        assert len(found) == 1 and calls in str(found[0].problem)
    else:
        assert [(call.name, call.arguments) for call in found] == calls
        assert all(call.problem is None for call in found)


@pytest.mark.parametrize("text", ['{"name": ', "{", '{"a":[', "{'name': "])
def test_a_model_that_repeats_itself_costs_no_minutes(text: str) -> None:
    """20,000 tokens of `{"name": ` took 100 s, in a rank where the turn is recorded."""
    parse_calls(text)  # first use
    start = time.process_time()
    parse_calls(text * 20_000)
    assert time.process_time() - start < 20


def test_a_turn_that_begins_in_a_thought_has_calls_behind_its_end_only() -> None:
    assert parse_calls(f"perhaps {F}", in_thought=True) == []
    assert [call.name for call in parse_calls(f"perhaps {F}</think>{G}", in_thought=True)] == ["g"]
    tools = load_environment(EnvSection(path=f"{Path(__file__).with_name('test_envs.py')}:Inherits"), in_thought=True)()
    assert tools.step("perhaps {'name': 'more', 'arguments': {}}").done
