"""A user's function as a reward."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from megatron_tlt.config.data import RewardConfig
from megatron_tlt.errors import RewardError
from megatron_tlt.types import Prompt, Sample

_CALL = "f(prompt, answer, response, metadata"


class PythonReward:
    """Calls f(prompt text, reference answer or None, response text, metadata, **params)."""

    def __init__(self, config: RewardConfig):
        """Imports the function. Raises RewardError naming what is missing or does not fit."""
        self._function, self._params = load_function(config), config.params

    def __call__(self, prompt: Prompt, sample: Sample) -> object:
        """Whatever the function returns or raises."""
        return self._function(prompt.text, prompt.answer, sample.text, prompt.metadata, **self._params)


def load_function(config: RewardConfig) -> Callable[..., object]:
    """The function at `config.path`, `package.module:function` or `path/to/file.py:function`.

    Raises RewardError naming module, function or signature. An error that the user's module raises while
    it is imported comes through as it is, with its traceback.
    """
    path = config.path or ""
    where, colon, name = path.rpartition(":")
    if not (where and colon and name):
        raise RewardError(
            f"reward path {path!r}: must be package.module:function or path/to/file.py:function"
        )
    module = _file_module(Path(where)) if where.endswith(".py") else _named_module(where)
    function = getattr(module, name, None)
    if function is None:
        raise RewardError(f"reward {path!r}: {where} has no {name!r}")
    if not callable(function):
        raise RewardError(f"reward {path!r}: {name!r} is a {type(function).__name__}, not a function")
    _check_signature(path, function, config)
    checked: Callable[..., object] = function
    return checked


def _named_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RewardError(f"reward module {name!r} cannot be imported: {error}") from error
    except SyntaxError as error:
        raise RewardError(f"reward module {name!r}: {error}") from error


def _file_module(path: Path) -> ModuleType:
    if not path.is_file():
        raise RewardError(f"reward file {path}: no such file (relative paths count from {Path.cwd()})")
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
    except (ImportError, SyntaxError) as error:
        del sys.modules[name]
        raise RewardError(f"reward file {path} cannot be imported: {error}") from error
    return module


def _check_signature(path: str, function: Callable[..., object], config: RewardConfig) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins do not tell
        return
    try:
        signature.bind("", "", "", {}, **config.params)
    except TypeError as error:
        call = f"{_CALL}{''.join(f', {key}=' for key in config.params)})"
        raise RewardError(f"reward {path!r}: called as {call}, but it takes {signature}: {error}") from error
