"""The inside of an environment worker: a process that holds the environments of many trajectories.

This module imports no numpy: a worker limits numpy's threads first.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from megatron_tlt.errors import EnvError
from megatron_tlt.workers.descendants import Started, sessions_ended
from megatron_tlt.workers.process import forks_ended

if TYPE_CHECKING:
    from megatron_tlt.envs.base import Environment, MakeEnvironment, Step
    from megatron_tlt.types import Prompt

Key: TypeAlias = tuple[int, int]  # (prompt id, sample index)


@dataclass(frozen=True, slots=True)
class Open:
    """Asks for the text that `reset` adds to a prompt."""

    prompt: Prompt
    longest: int | None = None  # characters of the text that travel
    opening: str | None = None  # the text in the prompt, of the first `reset`: another one is an error


@dataclass(frozen=True, slots=True)
class Play:
    """Asks for the answers to turns of a trajectory: to `turns`, after those that the worker has played."""

    key: Key
    begin: Open | None  # the worker begins the trajectory anew with it
    turns: tuple[str, ...]
    longest: int | None = None  # characters of an observation that travel

    @property
    def num_calls(self) -> int:
        """Calls of the environment, each with the timeout."""
        return len(self.turns) + (self.begin is not None)


@dataclass(frozen=True, slots=True)
class Discard:
    """Ends a trajectory's environment, if the worker has one."""

    key: Key


Request: TypeAlias = Open | Play | Discard


def environment_host(section_json: str, in_thought: bool) -> EnvironmentHost:
    """`section_json`: the `EnvSection`; `in_thought`: see `load_environment`. Raises EnvError."""
    from megatron_tlt.config.env import EnvSection
    from megatron_tlt.envs.build import load_environment

    return EnvironmentHost(load_environment(EnvSection.model_validate_json(section_json), in_thought=in_thought))


class EnvironmentHost:
    """The environments in one process, by trajectory."""

    def __init__(self, make: MakeEnvironment):
        self._make = make
        self._environments: dict[Key, Environment] = {}
        self._started: dict[Key, Started] = defaultdict(Started)

    def answer(self, request: Request) -> object:
        """The answer. After an error of the environment, which may be any, that stays until it is discarded."""
        with forks_ended():
            if isinstance(request, Open):
                return self._open(request)
            if isinstance(request, Play):
                return self._play(request)
            self._discard(request.key)
            return None

    def _open(self, request: Open) -> str | None:
        with sessions_ended():
            environment = self._make()
            try:
                text = _reset(environment, request)
            except BaseException:
                with suppress(Exception):  # the error of `reset` counts
                    _close(environment)
                raise
            _close(environment)
        return text

    def _play(self, request: Play) -> list[Step]:
        from megatron_tlt.envs.base import as_step

        if request.begin is not None:
            self._discard(request.key)
        with self._started[request.key].noted():
            if request.begin is not None:
                environment = self._environments[request.key] = self._make()
                _reset(environment, request.begin)
            environment = self._environments[request.key]
            steps = [as_step(environment.step(turn)) for turn in request.turns]
        return [step._replace(observation=step.observation[: request.longest]) for step in steps]

    def _discard(self, key: Key) -> None:
        """Closes the trajectory's environment, and ends what it has started in sessions of their own."""
        environment = self._environments.pop(key, None)
        try:
            if environment is not None:
                _close(environment)
        finally:
            if (started := self._started.pop(key, None)) is not None:
                started.end_sessions()


def _reset(environment: Environment, request: Open) -> str | None:
    """The text that `reset` adds to the prompt. Raises EnvError for another one than before: the model would answer the
    one, and be judged by the other.
    """
    from megatron_tlt.envs.base import as_opening  # not above: it imports numpy

    text = as_opening(environment.reset(request.prompt, request.prompt.seed))
    text = None if text is None else text[: request.longest]
    if request.opening is not None and text != request.opening:
        raise EnvError("the environment is not a function of prompt and seed: the prompt has the opening "
                       f"{request.opening!r:.80}, reset now returned {text!r:.80}")  # fmt: skip
    return text


def _close(environment: Environment) -> None:
    """An environment by duck typing may have no `close`."""
    if hasattr(environment, "close"):
        environment.close()
