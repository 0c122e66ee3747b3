"""A user's function or class by its path."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_tlt.errors import UserCodeError, did_you_mean, nearest_name, no_such_file, place_of

_folders: set[str] = set()  # in which users' modules are looked for


def load_object(path: str) -> Any:
    """The object at `package.module:name` or `path/to/file.py:name`. Appends a folder to sys.path, see `_look_in`.

    Raises UserCodeError for a wrong path or name, or with the error of the module at import.
    """
    where, _, name = path.rpartition(":")
    try:
        module = _module(where)
    except UserCodeError:
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise anything at import
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == where
        place = nearest_name(f"{where}.py") if is_missing else place_of(error)
        raise UserCodeError(f"{where} cannot be imported: {type(error).__name__}: {error}{place}") from error
    found = getattr(module, name, None)
    if found is None:
        raise UserCodeError(f"{where} has no {name!r}{did_you_mean(name, vars(module))}")
    return found


def code_digest(source: Path) -> str:
    """Fingerprint of every .py file in the folder of a module's file.

    Helper modules beside it count; folders below it and installed packages do not.
    """
    files = sorted(file for file in source.parent.glob("*.py") if file.is_file())  # an editor's lock is a dangling link
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()[:16]


def loaded_code(path: str | None) -> dict[str, str]:
    """Fingerprints, by file, of the module of `path` and of the modules beside it that are imported in this process;
    none without a path.
    """
    source = None if path is None else source_of(path)
    if source is None:
        return {}
    folders = {str(source.absolute().parent), str(source.resolve().parent)}
    named = [getattr(module, "__dict__", {}).get("__file__") for module in [*sys.modules.values()]]
    beside = [file for file in named if isinstance(file, str) and os.path.dirname(file) in folders]
    return {file: _fingerprint(Path(file)) for file in (str(source.absolute()), *beside)}


def check_unchanged(code: Mapping[str, str]) -> None:
    """Raises UserCodeError naming a file that is not as it was when `loaded_code` saw it: else a worker that takes
    another's place judges by other code than the workers beside it.
    """
    for file, fingerprint in code.items():
        if _fingerprint(Path(file)) != fingerprint:
            raise UserCodeError(f"{file} has changed since the run's start; the same command, given again, goes on "
                                "with the new code")  # fmt: skip


def _fingerprint(file: Path) -> str:
    """Of a file's bytes; empty where it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def source_of(path: str) -> Path | None:
    """The file of the module of `package.module:name` or `path/to/file.py:name`; None: it is in none, or not there."""
    where = path.rpartition(":")[0]
    if where.endswith(".py"):
        return Path(where) if Path(where).is_file() else None
    try:
        found = importlib.util.find_spec(where)
    except ImportError:  # of a package above it
        return None
    return None if found is None or not found.has_location else Path(str(found.origin))


def not_plain(function: object) -> str | None:
    """What a function is that returns no value when it is called, "async" or "a generator"; None: it returns one."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "async"
    return "a generator" if inspect.isgeneratorfunction(function) else None


def _look_in(folder: Path) -> None:
    """Appends a folder to sys.path: `python -m` has the working directory there, the script of `check` has not, and a
    user's file has modules beside it. It is the last one, so that no installed module gives way to a user's.

    Raises UserCodeError for a module there that would get another folder's in its place.
    """
    if str(folder) in _folders:
        return
    for file in sorted(folder.glob("*.py")):
        there = getattr(sys.modules.get(file.stem), "__file__", None)
        if there is not None and str(Path(there).parent) in _folders:
            raise UserCodeError(f"{file}: {there}, of the same name, is imported already: rename one of the two files")
    _folders.add(str(folder))
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        _look_in(Path.cwd())
        return importlib.import_module(where)
    path = Path(where)
    if not path.is_file():
        raise UserCodeError(f"{path}: {no_such_file(path)}")
    _look_in(path.resolve().parent)
    # A name of its own for every file, so that two files called reward.py do not shadow each other.
    name = f"_user_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
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
