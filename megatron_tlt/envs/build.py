"""The configured environment, loaded; also users' environments, Gymnasium's methods, and classes of tools."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_tlt.config.env import EnvSection
from megatron_tlt.envs.base import Environment, MakeEnvironment, ToolSchema
from megatron_tlt.envs.gymnasium import GymnasiumEnvironment
from megatron_tlt.envs.schemas import check_plain, tool_schemas
from megatron_tlt.envs.tools import ToolEnvironment
from megatron_tlt.errors import ConfigProblem, EnvError, Problems, UserCodeError
from megatron_tlt.workers.user_code import code_digest, load_object

BUILT_IN = {
    "calculator": "Calculator",
    "number_guess": "NumberGuess",
    "python": "Python",
    "retry": "Retry",
}


def load_environment(section: EnvSection, *, in_thought: bool = False) -> MakeEnvironment:
    """A constructor of the environment of one trajectory. Raises EnvError naming what is missing or does not fit.

    `in_thought`: the model's turns begin within a thought, which the chat template has opened.
    """
    loaded = _load_class(section)
    make = partial(loaded, **section.params)
    if not hasattr(loaded, "step"):
        return lambda: ToolEnvironment(make(), section.tool_role, in_thought=in_thought)
    if _is_gymnasium(loaded):
        return lambda: GymnasiumEnvironment(make())
    return make


def environment_tools(section: EnvSection) -> list[ToolSchema]:
    """The tools that the chat template shows the model; none for an environment with `step`. Raises EnvError."""
    loaded = _load_class(section)
    return [] if hasattr(loaded, "step") else tool_schemas(loaded)


def has_opening(section: EnvSection) -> bool:
    """Whether `reset` may add a text to the prompt. Raises EnvError."""
    return getattr(_load_class(section), "reset", Environment.reset) is not Environment.reset


def gives_rewards(section: EnvSection) -> bool:
    """Whether turns may have rewards, which those of tools have by `score` only. Raises EnvError."""
    loaded = _load_class(section)
    return hasattr(loaded, "step") or hasattr(loaded, "score")


def environment_problems(section: EnvSection) -> list[ConfigProblem]:
    """Why the environment cannot be loaded. Imports it here."""
    try:
        environment_tools(section)
        arguments = inspect.signature(_load_class(section)).bind(**section.params)
    except EnvError as error:
        return [ConfigProblem(*section.named_by, str(error))]
    except TypeError as error:
        return [ConfigProblem("env.params", section.params, f"do not fit the constructor: {error}")]
    except ValueError:  # a class without a signature
        return []
    arguments.apply_defaults()
    return [*_param_problems(section, arguments.arguments)]


def _param_problems(section: EnvSection, params: Mapping[str, Any]) -> Problems:
    """Parameters of built-in environments with which each call or turn would fail, or count for nothing."""
    if section.kind == "python":
        for name in ("cpu_s", "memory_mib", "output_kib"):
            if type(params[name]) is not int or params[name] < 1:
                yield ConfigProblem(f"env.params.{name}", params[name], "must be an integer > 0")
        wall_s = params["wall_s"]
        if type(wall_s) not in (int, float) or not 0 < wall_s < section.timeout_s:
            allowed = f"must be a number > 0 and < env.timeout_s = {section.timeout_s:g}: a turn's programs run in it"
            yield ConfigProblem("env.params.wall_s", wall_s, allowed)
    if section.kind == "retry":
        tries = params["tries"]
        if type(tries) is not int or not 1 <= tries <= section.max_turns:
            allowed = f"must be an integer from 1 to env.max_turns = {section.max_turns}: the last try is what counts"
            yield ConfigProblem("env.params.tries", tries, allowed)


def environment_warning(section: EnvSection) -> str | None:
    """What the environment lacks on this machine. May start a process."""
    if section.kind != "python":
        return None
    from megatron_tlt.envs.python import network_warning

    return network_warning()


def environment_fingerprint(section: EnvSection) -> dict[str, Any]:
    """The settings on which a trajectory depends, and `code_digest` of the environment's module. JSON-able.

    Raises EnvError.
    """
    loaded = _load_class(section)
    source = inspect.getsourcefile(loaded)
    digest = "" if source is None else code_digest(Path(source))
    not_read = {"timeout_s", "workers", "worker_memory_mib", "path"}
    return {**section.model_dump(mode="json", exclude=not_read), "class": loaded.__qualname__, "source": digest}


def _load_class(section: EnvSection) -> Any:
    if section.path is None:
        assert section.kind is not None, "config/checks requires it"
        return getattr(import_module(f"megatron_tlt.envs.{section.kind}"), BUILT_IN[section.kind])
    try:
        loaded = load_object(section.path)
    except UserCodeError as error:
        raise EnvError(f"environment {section.path!r}: {error}") from error
    if not isinstance(loaded, type):
        raise EnvError(f"environment {section.path!r}: is a {type(loaded).__name__}, not a class")
    if hasattr(loaded, "step") and not hasattr(loaded, "reset"):
        raise EnvError(f"environment {section.path!r}: has step and no reset")
    if hasattr(loaded, "step"):
        check_plain(loaded, "step", "response")
        if _is_gymnasium(loaded):
            check_plain(loaded, "reset", seed="seed")
        else:
            check_plain(loaded, "reset", "prompt", "seed")
        if hasattr(loaded, "close"):
            check_plain(loaded, "close")
    return loaded


def _is_gymnasium(loaded: Any) -> bool:
    """Whether `reset` is Gymnasium's and gem's, which can be called without a prompt, and not reset(prompt, seed)."""
    signature = inspect.signature(loaded.reset)
    try:
        signature.bind(None, seed=0)
    except TypeError:
        return False
    return "prompt" not in signature.parameters
