"""The inside of an environment worker: a process that holds the environments of many trajectories.

It reads one request at a time from its pipe and answers it with (True, value) or (False, why).
"""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from megatron_tlt.errors import TltError, error_line
from megatron_tlt.workers.child_signals import sigterm_ends_forks
from megatron_tlt.workers.descendants import Started, keep
from megatron_tlt.workers.process import end_if_full, forks_ended, limit_memory, note_loaded, set_up

if TYPE_CHECKING:
    from megatron_tlt.envs.base import Environment, MakeEnvironment, Step
    from megatron_tlt.types import Prompt

Key: TypeAlias = tuple[int, int]  # (prompt id, sample index)


@dataclass(frozen=True, slots=True)
class Open:
    """Asks for the text that `reset` adds to a prompt."""

    prompt: Prompt
    longest: int | None = None  # characters of the text that travel
    num_calls: ClassVar[int] = 1  # of the environment, each with the timeout


@dataclass(frozen=True, slots=True)
class Play:
    """Asks for the answers to turns of a trajectory: to `turns`, after those that the worker has played."""

    key: Key
    prompt: Prompt | None  # the worker begins the trajectory anew with it
    turns: tuple[str, ...]
    longest: int | None = None  # characters of an observation that travel

    @property
    def num_calls(self) -> int:
        """Calls of the environment, each with the timeout."""
        return len(self.turns) + (self.prompt is not None)


@dataclass(frozen=True, slots=True)
class Discard:
    """Ends a trajectory's environment, if the worker has one."""

    key: Key
    num_calls: ClassVar[int] = 1


Request: TypeAlias = Open | Play | Discard


def serve(pipe: Connection, section_json: str, in_thought: bool, rank: int, cpus: Collection[int] = ()) -> None:
    """The process. `section_json`: the `EnvSection`; `in_thought`: see `load_environment`; `rank`: process id of the
    parent; `cpus`: see `set_up`.

    First sends None, or why it cannot load the environment. Ends with the pipe.
    """
    set_up(rank, cpus)
    keep(rank)
    sigterm_ends_forks()
    multiprocessing.current_process().daemon = False  # a daemon, as which the rank has started it, may start no process
    from megatron_tlt.config.env import EnvSection
    from megatron_tlt.envs.build import load_environment

    section = EnvSection.model_validate_json(section_json)
    limit_memory(section.worker_memory_mib)
    try:
        host = EnvironmentHost(load_environment(section, in_thought=in_thought))
    except BaseException as error:  # noqa: BLE001  a user's module may raise anything
        pipe.send(str(error) if isinstance(error, TltError) else error_line(error))
        return
    note_loaded()
    pipe.send(None)
    try:
        while True:
            is_good, value = host.answer(pipe.recv())
            if not is_good:
                end_if_full(value)
            pipe.send((is_good, value))
    except (EOFError, OSError):  # the rank has closed its end
        return


class EnvironmentHost:
    """The environments in one process, by trajectory."""

    def __init__(self, make: MakeEnvironment):
        self._make = make
        self._environments: dict[Key, Environment] = {}
        self._started: dict[Key, Started] = defaultdict(Started)

    def answer(self, request: Request) -> tuple[bool, Any]:
        """(True, value), or (False, why) after an error of the environment, which stays until it is discarded."""
        try:
            with forks_ended():
                if isinstance(request, Open):
                    return True, self._open(request)
                if isinstance(request, Play):
                    return True, self._play(request)
                self._discard(request.key)
        # A user's code may raise anything, even KeyboardInterrupt, which no terminal sends here: the trajectory gets a
        # recorded failure.
        except BaseException as error:  # noqa: BLE001
            return False, error_line(error)
        return True, None

    def _open(self, request: Open) -> str | None:
        from megatron_tlt.envs.base import as_opening  # not above: it imports numpy

        started = Started()
        try:
            with started.noted():
                environment = self._make()
                try:
                    text = as_opening(environment.reset(request.prompt, request.prompt.seed))
                except BaseException:
                    with suppress(Exception):  # the error of `reset` counts
                        _close(environment)
                    raise
                _close(environment)
        finally:
            started.end_sessions()
        return None if text is None else text[: request.longest]

    def _play(self, request: Play) -> list[Step]:
        from megatron_tlt.envs.base import as_step

        if request.prompt is not None:
            self._discard(request.key)
        with self._started[request.key].noted():
            if request.prompt is not None:
                environment = self._environments[request.key] = self._make()
                environment.reset(request.prompt, request.prompt.seed)
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


def _close(environment: Environment) -> None:
    """An environment by duck typing may have no `close`."""
    if hasattr(environment, "close"):
        environment.close()
