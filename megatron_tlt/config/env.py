"""Multi-turn environments."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt

from megatron_tlt.config.base import FilePath, OpenMapping, Section

EnvKind: TypeAlias = Literal["calculator", "number_guess", "python", "retry"]


class EnvSection(Section):
    """The environment that answers the model's turns (docs/guides/agents.md)."""

    kind: EnvKind | None = None
    """A built-in one. retry: another try after a wrong answer; calculator, python: tools; number_guess: a game."""
    path: Annotated[str | None, FilePath()] = None
    """One of your own: `package.module:Class` or `path/to/file.py:Class`. An environment (reset, step, close), one with
    Gymnasium's methods, or a class of tools (its public methods)."""
    params: OpenMapping = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""
    max_turns: PositiveInt = 4
    """Turns of the model in one trajectory, which ends with the last one."""
    max_turn_tokens: PositiveInt | None = None
    """Longest turn in tokens; default: what `rollout.max_tokens`, which counts all turns and observations, leaves."""
    max_observation_tokens: PositiveInt = 512
    """Observations are cut to so many tokens, with a mark."""
    tool_role: Literal["tool", "user"] = "tool"
    """Role of a tool's answer in the chat template; user: for templates without that of a tool."""
    rewritten_history: Literal["refuse", "keep"] = "refuse"
    """With a chat template that renders earlier turns otherwise than they were generated (without their thoughts, for
    example): refuse to start, or keep the turns as they were generated, which a server of the model would not do."""
    timeout_s: PositiveFloat = 30.0
    """A step or a reset that takes longer costs that trajectory a recorded failure: it is not trained on. Wall-clock
    time: other processes on the same CPUs count."""
    workers: PositiveInt = 1
    """Worker processes per rank; each runs one step at a time and holds many trajectories' environments. The first rank
    of an engine of several (`rollout.tp`) has those and the CPUs of all."""
    worker_memory_mib: PositiveInt = 8192
    """Memory of one worker process. One is replaced where half of what the loaded code has left of it stays taken after
    a MemoryError."""

    @property
    def is_named(self) -> bool:
        """Whether there is one; the other settings may come from `defaults` without it."""
        return bool(self.kind or self.path)

    @property
    def named_by(self) -> tuple[str, str | None]:
        """The setting that names the environment, and its value."""
        return ("env.path", self.path) if self.path else ("env.kind", self.kind)
