"""The inside of an environment worker: a process that holds the environments of many trajectories.

It reads one request at a time from its pipe and answers it with (True, value) or (False, why).
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeAlias

from megatron_tlt.errors import TltError
from megatron_tlt.workers.process import limit_memory, set_up

if TYPE_CHECKING:
    from megatron_tlt.envs.base import Environment, MakeEnvironment, Step
    from megatron_tlt.types import Prompt

Key: TypeAlias = tuple[int, int]  # (prompt id, sample index)
_LONGEST_FAILURE = 500  # characters of an error message that travel and are logged


@dataclass(frozen=True, slots=True)
class Open:
    """Asks for the text that `reset` adds to a prompt."""

    prompt: Prompt

    @property
    def num_calls(self) -> int:
        """Calls of the environment, each with the timeout."""
        return 1


@dataclass(frozen=True, slots=True)
class Play:
    """Asks for the answers to turns of a trajectory: to `turns`, after those that the worker has played."""

    key: Key
    prompt: Prompt | None  # the worker begins the trajectory anew with it
    turns: tuple[str, ...]

    @property
    def num_calls(self) -> int:
        """Calls of the environment, each with the timeout."""
        return len(self.turns) + (self.prompt is not None)


@dataclass(frozen=True, slots=True)
class Discard:
    """Ends a trajectory's environment, if the worker has one."""

    key: Key

    @property
    def num_calls(self) -> int:
        """Calls of the environment, each with the timeout."""
        return 1


Request: TypeAlias = Open | Play | Discard


def serve(pipe: Connection, section_json: str, rank: int) -> None:
    """The process. `section_json`: the `EnvSection`; `rank`: process id of the parent.

    First sends None, or why it cannot load the environment. Ends with the pipe.
    """
    set_up(rank)
    from megatron_tlt.config.env import EnvSection
    from megatron_tlt.envs.build import load_environment

    section = EnvSection.model_validate_json(section_json)
    limit_memory(section.worker_memory_mib)
    try:
        host = EnvironmentHost(load_environment(section))
    except TltError as error:
        pipe.send(str(error))
        return
    pipe.send(None)
    try:
        while True:
            pipe.send(host.answer(pipe.recv()))
    except (EOFError, OSError):  # the rank has closed its end
        return


class EnvironmentHost:
    """The environments in one process, by trajectory."""

    def __init__(self, make: MakeEnvironment):
        self._make = make
        self._environments: dict[Key, Environment] = {}

    def answer(self, request: Request) -> tuple[bool, Any]:
        """(True, value), or (False, why) after an error of the environment, which stays until it is discarded."""
        from megatron_tlt.envs.base import as_text  # not above: it imports numpy

        try:
            if isinstance(request, Open):
                return True, self._open(request.prompt)
            if isinstance(request, Play):
                return True, self._play(request)
            self._discard(request.key)
        # A user's code may raise anything, even call sys.exit: the trajectory gets a recorded failure.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            return False, as_text(f"{type(error).__name__}: {error}")[:_LONGEST_FAILURE]
        return True, None

    def _open(self, prompt: Prompt) -> str | None:
        from megatron_tlt.envs.base import as_text

        environment = self._make()
        try:
            text = environment.reset(prompt, prompt.seed)
        finally:
            environment.close()
        return None if text is None else as_text(text)

    def _play(self, request: Play) -> list[Step]:
        from megatron_tlt.envs.base import as_step

        if request.prompt is not None:
            self._discard(request.key)
            environment = self._environments[request.key] = self._make()
            environment.reset(request.prompt, request.prompt.seed)
        environment = self._environments[request.key]
        return [as_step(environment.step(turn)) for turn in request.turns]

    def _discard(self, key: Key) -> None:
        if (environment := self._environments.pop(key, None)) is not None:
            environment.close()
