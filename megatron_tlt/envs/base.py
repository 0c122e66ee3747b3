"""What an environment is.

    reset(prompt, seed) -> text appended to the prompt        once a prompt, before its responses
    step(response) -> Step                                    once a turn, in an instance of the trajectory's own
    close()

`step` must be a function of prompt, seed and the turns so far: of no clock, no other trajectory, no random state but
its own. Then a response depends on no worker and no delay, and a lost worker's environments are played again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from megatron_tlt.types import Prompt

Role: TypeAlias = Literal["user", "tool"]


class Step(NamedTuple):
    """An environment's answer to a turn. With `done` the trajectory ends, and the observation is not read."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    role: Role = "user"  # of the message that the observation becomes


class Environment:
    """Base of environments; what has the same methods is one too. An instance has one trajectory."""

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

    def given(self, observation: str, role: Role, drawn: Sequence[int]) -> tuple[int, ...]:
        """The tokens between the drawn turn `drawn` (with the stop token, if one ended it) and the next one."""


def as_text(value: object) -> str:
    """The value's text, of None an empty one. Halves of surrogate pairs, which no tokenizer encodes, become '?'."""
    return "" if value is None else str(value).encode(errors="replace").decode()


def as_step(value: object) -> Step:
    """A `Step`, also of a plain tuple. Raises TypeError for other values and roles, ValueError for a reward of NaN."""
    if not isinstance(value, tuple) or not 1 <= len(value) <= len(Step._fields):
        raise TypeError(f"step returned {value!r:.80}: must be a Step(observation, reward, done, role)")
    step = Step(*value)
    if step.role not in ("user", "tool"):
        raise TypeError(f"step returned the role {step.role!r}: must be 'user' or 'tool'")
    reward = float(step.reward)
    if not math.isfinite(reward):
        raise ValueError(f"step returned the reward {reward}: must be finite")
    return Step(as_text(step.observation), reward, bool(step.done), step.role)
