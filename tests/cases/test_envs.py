"""Environments and tools as people write them, and calls as models write them: kinds of input from public reports."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_tlt.cli.ranks import print_problems
from megatron_tlt.config.env import EnvSection
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.data.turns import CUT_MARK, TurnTokens
from megatron_tlt.envs.base import NoTextError, Step
from megatron_tlt.envs.build import environment_problems, load_environment
from megatron_tlt.envs.calls import parse_calls
from megatron_tlt.envs.check import episode_problems
from megatron_tlt.envs.pool import EnvironmentPool
from megatron_tlt.errors import ConfigError, EnvError
from megatron_tlt.observe.log import RankFormatter
from megatron_tlt.types import Prompt, TurnResult

PROMPT = Prompt(0, "d:0", (), "q", "7", seed=3)
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
        (f"{F}; {G}", [f, g]),
        (f"{F}\n\n{G}", [f, g]),
        (f"<|python_tag|>{G}; {F}", [g, f]),
        (f"Here is the call: {G} and no more.", [g]),
        (f'{{"type": "function", "function": {F}}}', [f]),
        ('{"type": "function", "name": "g", "parameters": {"b": 2}}', [g]),
        ('{"name": "f", "arguments": null}', [("f", {})]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [f]),
        ('{"name": "f", "arguments": ""}', [("f", {})]),
        ('{"name": "f", "parameters": {"q": "a {b} [c] \\"d\\""}}', [("f", {"q": 'a {b} [c] "d"'})]),
        # Mistral (its tags are special tokens, which the text of a turn lacks), xLAM, Phi-4-mini, Granite, Nemotron
        (f"[TOOL_CALLS][{F}, {G}]", [f, g]),
        (f"[{F}, {G}]", [f, g]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}', [f, g]),
        ('f{"a": 1}', [f]),
        (f"```json\n[{F}]\n```", [f]),
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
        ('{"tool": "f", "args": {"a": 1}}', "a call must be"),
        ('{"action": "f", "action_input": "x"}', "a call must be"),
        ("<tool_call>f(a=1)</tool_call>", "calls of this form are not read"),
        ("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "of this form are not read"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f", "of this form are not read"),
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
    assert time.process_time() - start < 2


def test_a_turn_that_begins_in_a_thought_has_calls_behind_its_end_only() -> None:
    assert parse_calls(f"perhaps {F}", in_thought=True) == []
    assert [call.name for call in parse_calls(f"perhaps {F}</think>{G}", in_thought=True)] == ["g"]
    tools = load_environment(EnvSection(path=f"{__file__}:Inherits"), in_thought=True)()
    assert tools.step("perhaps {'name': 'more', 'arguments': {}}").done


class Kind(Enum):
    RED = "red"


class Good:
    """Tools with every type that a schema has."""

    limit = 3

    def many(
        self,
        a: int | None,
        b: list[dict[str, int]] | int,
        c: Literal[3, "x"],
        d: Kind,
        e: tuple[int, str],
        *,
        f: Annotated[int, Field(ge=10)] = 10,
        g: Any = None,
    ) -> object:
        """
        Takes all.

        Args:
            a: One.
            b: One.
            c: One.
            d: One.
            e: One.
            f: One.
            g: One.
        """
        return [type(x).__name__ for x in (a, b, c, d, e, f, g)]

    @property
    def left(self) -> int:
        return 3


class Inherits(Good):
    """With a tool of its own, and one that waits."""

    def texts(self, a: str | None, b: str) -> list[str | None]:
        """
        Gives them back.

        Args:
            a: One.
            b: One.
        """
        return [a, b]

    def more(self) -> np.ndarray:
        """Numbers."""
        return np.arange(3)

    @staticmethod
    def waits() -> str:
        """Waits."""

        async def answer() -> str:
            return "waited"

        return asyncio.run(answer())


def tool(how: Callable[[Any], Any], signature: str = "self, x: int", body: str = "return 1") -> type:
    """A class with one tool `f`."""
    source = f'def f({signature}):\n    """Does.\n\n    Args:\n        x: One.\n    """\n    {body}'
    place: dict[str, Any] = {}
    exec(source if "await" not in body else f"async {source}", globals(), place)
    return type("Bad", (), {"f": how(place["f"])})


def plain(function: Any) -> Any:
    return function


def hides_signature(function: Any) -> Any:
    def inner(*args: Any, **kwargs: Any) -> Any:
        """Does."""
        return function(*args, **kwargs)

    return inner


BAD_TOOLS = {
    "Stars": (tool(plain, "self, *x: int"), "is a variadic positional parameter"),
    "Keywords": (tool(plain, "self, **x: int"), "is a variadic keyword parameter"),
    "Positional": (tool(plain, "self, x: int, /"), "positional-only parameter"),
    "ClassMethod": (tool(classmethod), "is a classmethod"),
    "Partial": (tool(lambda function: functools.partial(function, x=1)), "is a partial"),
    "NoSelf": (tool(plain, ""), "has no parameter self"),
    "Hidden": (tool(hides_signature), "variadic"),
    "Async": (tool(plain, body="await 1"), "is async"),
    "Generator": (tool(plain, body="yield 1"), "is a generator"),
    "AsyncGenerator": (tool(plain, body="yield await 1"), "is async"),
    "Untyped": (tool(plain, "self, x"), "missing a type hint"),
    "Bytes": (tool(plain, "self, x: bytes"), "bytes"),
    "Alias": (tool(plain, "self, x: Annotated[int, Field(alias='y')]"), "its schema allows {'x': 1}, which its"),
    "Close": (type("Close", (Good,), {"close": lambda self, door: None}), "must be callable as close()"),
    "Score": (type("Score", (Good,), {"score": lambda self: 1.0}), "must be callable as score(response)"),
}
globals().update({name: bad for name, (bad, _) in BAD_TOOLS.items()})


@pytest.mark.parametrize("name", BAD_TOOLS)
def test_tools_that_no_call_can_satisfy_are_refused_at_load(name: str) -> None:
    (problem,) = environment_problems(EnvSection(path=f"{__file__}:{name}"))
    assert problem.path == "env.path"
    assert ".f: " in problem.allowed or f".{name.lower()}: " in problem.allowed
    assert BAD_TOOLS[name][1] in problem.allowed


def test_tools_that_calls_satisfy_are_taken() -> None:
    section = EnvSection(path=f"{__file__}:Inherits")
    assert environment_problems(section) == []
    assert episode_problems(section, PROMPT) == []
    tools = load_environment(section)()
    xml = "<function=many><parameter=a>\n2\n</parameter><parameter=b>\n[{}]\n</parameter><parameter=c>3</parameter>"
    xml += '<parameter=d>red</parameter><parameter=e>[1, "2"]</parameter><parameter=f>12</parameter></function>'
    assert tools.step(xml).observation == '["int", "list", "int", "Kind", "tuple", "int", "NoneType"]'
    # as vLLM's parser of Qwen3-Coder has it, also where a text is one
    nulls = "<function=texts><parameter=a>null</parameter><parameter=b>null</parameter></function>"
    assert tools.step(nulls).observation == '[null, "null"]'
    assert tools.step("[more(), waits()]").observation == "[0, 1, 2]\nwaited"


class Answers:
    """Tools whose answers are no values."""

    def late(self) -> Any:
        """A coroutine, of a function that looks plain."""
        return asyncio.sleep(0)

    def lazy(self) -> Any:
        """A generator."""
        return (x for x in "abc")

    def raw(self) -> Any:
        """Bytes."""
        return b"raw"

    def thing(self) -> Any:
        """An object without a text."""
        return [object()]

    def keys(self) -> Any:
        """An object whose keys are no texts."""
        return {(1, 2): 3}


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("late", "coroutine"), ("lazy", "generator"), ("raw", "bytes"), ("thing", "object"), ("keys", "keys must be")],
)
def test_an_answer_that_is_no_value_is_a_failure_by_name(name: str, kind: str) -> None:
    """crewAI #7474: the model saw `<coroutine object ..>`, with an address that no other run repeats."""
    with pytest.raises(NoTextError, match=f"tool {name} returned {kind}.*: must be a text or what JSON has"):
        load_environment(EnvSection(path=f"{__file__}:Answers"))().step(f"[{name}()]")
    assert "tool late returned coroutine" in str(episode_problems(EnvSection(path=f"{__file__}:Answers"), PROMPT)[0])


class Duck:
    """By duck typing, without `close`. Its prompt says what it returns."""

    def reset(self, prompt: Prompt, seed: int) -> Any:
        if prompt.text == "raise":
            raise type("Odd\x1b", (Exception,), {})("the real error\x1b[31m")
        return {"text": "opening", "pair": ("opening", {}), "dict": {}}[prompt.text]

    def step(self, response: str) -> Any:
        return {
            "plain": ("a", 1),
            "number": Step(np.int64(7), np.float32(1.0), np.False_),
            "huge": Step("x " * 10_000_000),
            "dict": {"observation": "a"},
            "none": None,
            "list": ["a", 1.0, False],
            "gymnasium": ("a", 1.0, False, False, {}),
            "old gym": ("a", 1.0, False, {}),
            "array": Step(np.arange(3)),
            "bytes": Step(b"a"),
            "dict text": Step({"a": 1}),
            "no reward": ("a", None),
            "text reward": ("a", "1"),
            "role for done": ("a", 0.0, "user"),
        }[response]


class NoText(Duck):
    """Gymnasium's, of an older form."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return "observation"


class Seeded(Duck):
    """Gymnasium's, with a seed that has no default."""

    def reset(self, seed: int) -> Any:
        return "observation", {}


class AsyncStep(Duck):
    async def step(self, response: str) -> Any:
        return Step()


class OtherReset(Duck):
    def reset(self, prompt: Prompt) -> Any:
        return None


class Letters:
    """Characters as tokens."""

    max_characters = 20

    def given(self, observation: str, role: str, drawn: Any) -> tuple[int, ...]:
        return tuple(map(ord, observation))


@pytest.fixture(scope="module")
def duck() -> Iterator[Callable[[str], TurnResult]]:
    """The result of one turn of `Duck`."""
    pool = EnvironmentPool(EnvSection(path=f"{__file__}:Duck", timeout_s=30))
    with closing(pool), closing(pool.trajectories(Letters())) as turns:

        def play(text: str) -> TurnResult:
            turns.submit(Prompt(0, "d", (), "text"), 0, 0, [5], text)
            while not (results := turns.poll(1.0)):
                pass
            turns.discard(0, 0)
            return results[0]

        yield play


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("plain", "a"),
        ("number", "7"),
        ("huge", "x x x x x x x x x x x"),  # verl #4918: no more than one character behind the bound travels
        ("dict", "TypeError: step returned a dict, {'observation': 'a'}: must be a Step(observation, reward, done"),
        ("none", "TypeError: step returned a NoneType, None: must be a Step"),
        ("list", "TypeError: step returned a list"),
        ("gymnasium", "Gymnasium's five are for a class whose reset takes no prompt"),
        ("old gym", "TypeError: step returned the role {}: must be 'user' or 'tool'"),
        ("array", "NoTextError: step returned an observation of type ndarray: must be a text"),
        ("bytes", "NoTextError: step returned an observation of type bytes"),
        ("dict text", "NoTextError: step returned an observation of type dict"),
        ("no reward", "ValueError: step returned the reward None (NoneType): must be a number"),
        ("text reward", "ValueError: step returned the reward '1'"),
        ("role for done", "TypeError: step returned 'user' for done"),
    ],
)
def test_what_step_returns_is_taken_or_named(text: str, given: str, duck: Callable[[str], TurnResult]) -> None:
    result = duck(text)
    assert given in (result.failure or "".join(map(chr, result.given)))


def test_openings_of_environments_by_duck_typing() -> None:
    with closing(EnvironmentPool(EnvSection(path=f"{__file__}:Duck", timeout_s=30), longest_opening=4)) as pool:
        assert pool.openings([Prompt(0, "d:0", (), "text")]) == ["open"]
        with pytest.raises(EnvError, match=r"d:1.: Odd\\x1b: the real error\\x1b\[31m$"):
            pool.openings([Prompt(1, "d:1", (), "raise")])
        for text, kind in (("pair", "tuple"), ("dict", "dict")):
            with pytest.raises(EnvError, match=f"reset returned a value of type {kind}: must be a text"):
                pool.openings([Prompt(1, "d:1", (), text)])


@pytest.mark.parametrize(
    ("name", "why"),
    [("AsyncStep", "AsyncStep.step: is async"), ("OtherReset", "must be callable as reset(prompt, seed)")],
)
def test_environments_that_cannot_be_called_are_refused_at_load(name: str, why: str) -> None:
    assert why in str(environment_problems(EnvSection(path=f"{__file__}:{name}"))[0])


def test_gymnasiums_older_forms_are_named() -> None:
    assert load_environment(EnvSection(path=f"{__file__}:Seeded"))().reset(PROMPT, 3) == "observation"
    old = load_environment(EnvSection(path=f"{__file__}:NoText"))()
    with pytest.raises(TypeError, match=r"reset returned a str, 'observation': must be \(observation, info\)"):
        old.reset(PROMPT, 3)
    with pytest.raises(TypeError, match=r"step returned 4 values.*must be \(observation, reward, terminated, trunc"):
        old.step("old gym")


def tokenizer_with_spaces(directory: Path) -> HFTokenizer:
    """Of bytes, and runs of up to 64 spaces in one token, as GPT-4's and Qwen's have them."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    runs = ["Ġ" * 2**n for n in range(7)]
    vocabulary |= {run: len(vocabulary) + i for i, run in enumerate(runs[1:])}
    raw = Tokenizer(models.BPE(vocabulary, list(zip(runs[:-1], runs[:-1], strict=True))))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="!")
    made.save_pretrained(str(directory))
    return HFTokenizer(directory)


@pytest.mark.parametrize("text", [" " * 100_000, "a" * 100_000, "é " * 50_000, (" " * 63 + "b\n") * 2000])
def test_a_long_observation_is_cut_before_it_is_encoded(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_with_spaces(tmp_path)
    turns = TurnTokens(tokenizer, chat=False, max_observation_tokens=50)
    whole = tokenizer.decode(tokenizer.encode(text)[:50])
    encoded: list[int] = []
    encode = HFTokenizer.encode
    monkeypatch.setattr(HFTokenizer, "encode", lambda self, text: encoded.append(len(text)) or encode(self, text))
    given = turns.given(text, "user", [])
    assert tokenizer.decode(given) == f"\n{whole}{CUT_MARK}\n"
    assert turns.given(text[: turns.max_characters + 1], "user", []) == given, "as it comes from the worker"
    assert max(encoded) <= turns.max_characters == (50 + 64) * 64


def test_control_characters_of_an_error_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    text = "bad \x1b[2J\x07\x9b31m\u202e\rline\n\ttab"
    shown = r"bad \x1b[2J\x07\x9b31m\u202e\rline"
    print_problems(ConfigError.of("env.path", "x", text))
    assert f"{shown}\n\ttab" in capsys.readouterr().err
    record = logging.LogRecord("megatron_tlt", logging.WARNING, "", 0, "%s", (text.replace("\r", ""),), None)
    assert shown.replace(r"\r", "") in RankFormatter().format(record)
