"""What an environment is.

    reset(prompt, seed) -> text appended to the prompt        once a prompt, before its responses
    step(response) -> Step                                    once a turn, in an instance of the trajectory's own
    close()

`step` must be a function of prompt, seed and the turns so far: of no clock, no other trajectory, no random state but
its own. Then a response depends on no worker and no delay, and a lost worker's environments are played again.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from megatron_tlt.types import Prompt
from megatron_tlt.workers.answers import as_number

Role: TypeAlias = Literal["user", "tool"]
_MOST_PLAIN = 4  # values of a plain tuple in place of a `Step`: five are Gymnasium's


class Step(NamedTuple):
    """An environment's answer to a turn. With `done` the trajectory ends, and the observation is not read; with
    `truncated` it ends, too, by a limit of the environment's own.
    """

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    role: Role = "user"  # of the message that the observation becomes
    truncated: bool = False


class Environment:
    """Base of environments; what has the same methods, `close` or not, is one too. An instance has one trajectory."""

    def reset(self, prompt: Prompt, seed: int) -> str | None:
        """Begins a trajectory. Returns a text for the end of the prompt, the same for all of its responses.

        `seed` (31 bits) is the prompt's: the environments of its responses are equal until they part by their turns.
        """
        return None

    def step(self, response: str) -> Step:
        """The answer to a turn, the text that the model drew, without special tokens."""
        raise NotImplementedError

    def close(self) -> None:
        """The trajectory has ended, perhaps before `done`."""


MakeEnvironment: TypeAlias = Callable[[], Environment]
ToolSchema: TypeAlias = dict[str, Any]
"""A tool as chat templates take it: the JSON schema of a function."""


class GivenTokens(Protocol):
    """From an observation to the tokens that a response continues with (`data.turns`)."""

    @property
    def max_characters(self) -> int:
        """Characters of an observation, of which no more are read; `given` marks a longer one as cut."""

    def given(self, observation: str, role: Role, drawn: Sequence[int]) -> tuple[int, ...]:
        """The tokens between the drawn turn `drawn` (with the stop token, if one ended it) and the next one."""


class NoTextError(TypeError):
    """A value of a user's code that cannot be an observation; the message names its type."""


def kind_without_text(value: object) -> str | None:
    """The type of a value whose text is none: of a call that was never made, bytes, an address. None: it has one."""
    has_address = type(value).__str__ is object.__str__ and type(value).__repr__ is object.__repr__
    is_code = isinstance(value, type | Iterator | AsyncIterator | Awaitable) or inspect.isroutine(value)
    has_none = has_address or is_code or isinstance(value, bytes | bytearray | memoryview)
    return type(value).__name__ if has_none else None


def as_text(value: object, where: str) -> str:
    """A text or a number as a text, None as an empty one. Raises NoTextError for other values, with `where`.

    Halves of surrogate pairs, which no tokenizer encodes, become '?'.
    """
    if value is None:
        return ""
    is_scalar = isinstance(value, str | numbers.Number) or getattr(value, "shape", None) == ()  # numpy's, too
    if not is_scalar:
        raise NoTextError(f"{where} of type {type(value).__name__}: must be a text")
    return str(value).encode(errors="replace").decode()


def as_opening(value: object) -> str | None:
    """The text of `reset`. Raises NoTextError for other values, such as Gymnasium's pairs."""
    return None if value is None else as_text(value, "reset returned a value")


def as_step(value: object) -> Step:
    """A `Step`, also of a plain tuple of up to four values. Raises TypeError for other values and roles, ValueError for
    other rewards.
    """
    if not isinstance(value, tuple) or not (isinstance(value, Step) or 1 <= len(value) <= _MOST_PLAIN):
        what = f"{len(value)} values" if isinstance(value, tuple) else f"a {type(value).__name__}"
        hint = " (Gymnasium's five are for a class whose reset takes no prompt)" if what == "5 values" else ""
        raise TypeError(f"step returned {what}, {value!r:.80}: must be a Step(observation, reward, done, role){hint}")
    step = Step(*value)
    role: Any = step.role
    if role not in ("user", "tool"):
        raise TypeError(f"step returned the role {role!r:.80}: must be 'user' or 'tool'")
    done, truncated = as_flag(step.done, "done"), as_flag(step.truncated, "truncated")
    number = as_number(step.reward, "step returned the reward")
    text = as_text(step.observation, "step returned an observation")
    return Step(text, number, done or truncated, role, truncated)


def as_flag(value: object, name: str) -> bool:
    """A flag of `step`. Raises TypeError for a text, and for what is true by being there, such as a method that was not
    called.
    """
    if isinstance(value, str) or kind_without_text(value) is not None:
        raise TypeError(f"step returned {value!r:.80} for {name}: must be true or false")
    return bool(value)
