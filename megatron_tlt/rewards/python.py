"""A user's function as a reward."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from megatron_tlt.config.data import RewardConfig
from megatron_tlt.errors import RewardError, UserCodeError
from megatron_tlt.rewards.base import Scorer
from megatron_tlt.types import Prompt, Sample
from megatron_tlt.workers.user_code import load_object

_CALL = "f(prompt, answer, response, metadata"


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
    _check_signature(function, config)
    checked: Callable[..., object] = function
    return checked


def _check_signature(function: Callable[..., object], config: RewardConfig) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins have none
        return
    try:
        signature.bind("", "", "", {}, **config.params)
    except TypeError as error:
        call = f"{_CALL}{''.join(f', {key}=' for key in config.params)})"
        raise RewardError(f"called as {call}, but it takes {signature}: {error}") from error
