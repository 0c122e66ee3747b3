"""Environments and tools as people write them, and calls as models write them: kinds of input from public reports."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field

from megatron_tlt.cli.ranks import print_problems
from megatron_tlt.config.env import EnvSection
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.data.turns import CUT_MARK, TurnTokens
from megatron_tlt.envs.base import NoTextError, Step
from megatron_tlt.envs.build import environment_problems, load_environment
from megatron_tlt.envs.check import episode_problems
from megatron_tlt.envs.pool import EnvironmentPool
from megatron_tlt.errors import ConfigError, EnvError
from megatron_tlt.observe.log import RankFormatter
from megatron_tlt.types import Prompt, TurnResult
from tests.helpers.chat_models import save_bytes

PROMPT = Prompt(0, "d:0", (), "q", "7", seed=3)


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
        with pytest.raises(EnvError, match=r"d:1.: Odd\\x1b: the real error\\x1b\[31m \(\S+:\d+\)$"):
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


@pytest.mark.parametrize("text", [" " * 100_000, "a" * 100_000, "é " * 50_000, (" " * 63 + "b\n") * 2000])
def test_a_long_observation_is_cut_before_it_is_encoded(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = ["Ġ" * 2**n for n in range(6)]  # of up to 64 spaces in one token, as GPT-4's and Qwen's tokenizers have them
    tokenizer = HFTokenizer(save_bytes(tmp_path, None, (), list(zip(runs, runs, strict=True)), eos_token="!"))
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
