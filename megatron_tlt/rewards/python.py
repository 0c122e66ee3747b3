"""A user's function as a reward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

from megatron_tlt.config.data import RewardConfig
from megatron_tlt.errors import RewardError, UserCodeError
from megatron_tlt.rewards.base import Scorer
from megatron_tlt.types import Prompt, Sample
from megatron_tlt.workers.user_code import load_object, not_plain

_CALL = "f(prompt, answer, response, metadata"
# What TRL, verl and others call the four arguments, in our order.
_OTHER_NAMES = (
    {"prompt", "prompts", "data_source"},
    {"answer", "answers", "ground_truth", "reference_answer"},
    {"response", "responses", "completion", "completions", "solution_str"},
    {"metadata", "extra_info"},
)
_BATCHES = {"completions", "responses"}


def python_reward(config: RewardConfig) -> Scorer:
    """f(prompt text, reference answer, response text, metadata, **params): whatever it returns or raises.

    The answer is a list where several are acceptable, None where there is none.

    Raises RewardError naming what is missing or does not fit.
    """
    try:
        function = load_function(config)
    except RewardError as error:
        raise RewardError(f"reward {config.path!r}: {error}") from error

    def score(prompt: Prompt, sample: Sample) -> object:
        answer = [*prompt.answer] if isinstance(prompt.answer, tuple) else prompt.answer
        return function(prompt.text, answer, sample.text, prompt.metadata, **config.params)

    return score


def load_function(config: RewardConfig) -> Callable[..., object]:
    """The function at `config.path`, `package.module:function` or `path/to/file.py:function`.

    Raises RewardError for a wrong path, function or signature, or with the error of the module at import.
    """
    assert config.path is not None, "config/checks requires it"
    try:
        function = load_object(config.path)
    except UserCodeError as error:
        raise RewardError(str(error)) from error
    name = config.path.rpartition(":")[2]
    if not callable(function):
        raise RewardError(f"{name!r} is a {type(function).__name__}, not a function")
    if problem := _not_a_function_of_one_response(function):
        raise RewardError(f"{name!r} {problem}")
    _check_signature(function, config)
    checked: Callable[..., object] = function
    return checked


def _not_a_function_of_one_response(function: Callable[..., object]) -> str | None:
    """Why a call would not return a number at once: a class, `async def`, a generator; None if it may."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isclass(function):
        return "is a class: must be a function, or an object that can be called, made in the module"
    for called in (function, getattr(function, "__call__", None)):  # noqa: B004  an object's own __call__
        if (kind := not_plain(called)) is not None:
            return f"is {kind}: it is called without await, and must return a number (asyncio.run inside it works)"
    return None


def _check_signature(function: Callable[..., object], config: RewardConfig) -> None:
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some built-ins have none
        return
    call = f"{_CALL}{''.join(f', {key}=' for key in config.params)})"
    try:
        signature.bind("", "", "", {}, **config.params)
    except TypeError as error:
        raise RewardError(f"called as {call}, but it takes {signature}: {error}") from error
    if wrong := _misplaced(signature):
        raise RewardError(f"called as {call}, but {wrong} in {signature}")


def _misplaced(signature: inspect.Signature) -> str | None:
    """A parameter that its name says is another of the four arguments than the one that it gets, or a batch."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in signature.parameters.values() if p.kind in positional][: len(_OTHER_NAMES)]
    for place, name in enumerate(names):
        others = [words for at, words in enumerate(_OTHER_NAMES) if at != place]
        if any(name in words for words in others):
            return f"{name!r} is argument {place + 1}"
        if name in _BATCHES:
            return f"{name!r} are of a batch (this function is called once a response)"
    return None
