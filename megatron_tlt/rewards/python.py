"""A user's function as a reward."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from megatron_tlt.config.data import RewardConfig
from megatron_tlt.errors import RewardError
from megatron_tlt.rewards.base import Scorer

_CALL = "f(prompt, answer, response, metadata"


def python_reward(config: RewardConfig) -> Scorer:
    """f(prompt text, reference answer or None, response text, metadata, **params): whatever it returns or raises.

    Raises RewardError naming what is missing or does not fit.
    """
    try:
        function = load_function(config)
    except RewardError as error:
        raise RewardError(f"reward {config.path!r}: {error}") from error
    return lambda prompt, sample: function(
        prompt.text, prompt.answer, sample.text, prompt.metadata, **config.params
    )


def load_function(config: RewardConfig) -> Callable[..., object]:
    """The function at `config.path`, `package.module:function` or `path/to/file.py:function`.

    Raises RewardError for a wrong path, function or signature, or with the error of the module at import.
    """
    assert config.path is not None, "config/checks requires it"
    where, _, name = config.path.rpartition(":")
    try:
        module = _module(where)
    except RewardError:
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise anything at import
        frames = traceback.extract_tb(error.__traceback__)
        places = [f for f in frames if f.filename != __file__ and "importlib" not in f.filename]
        at = f" ({places[-1].filename}:{places[-1].lineno})" if places else ""
        raise RewardError(f"{where} cannot be imported: {type(error).__name__}: {error}{at}") from error
    function = getattr(module, name, None)
    if function is None:
        raise RewardError(f"{where} has no {name!r}")
    if not callable(function):
        raise RewardError(f"{name!r} is a {type(function).__name__}, not a function")
    _check_signature(function, config)
    checked: Callable[..., object] = function
    return checked


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    path = Path(where)
    if not path.is_file():
        raise RewardError(f"{path}: no such file (relative paths count from {Path.cwd()})")
    # A name of its own for every file, so that two files called reward.py do not shadow each other.
    name = f"_reward_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


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
