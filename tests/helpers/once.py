"""Runs that many tests share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def once(run: Callable[P, T]) -> Callable[P, T]:
    """`functools.cache` that keeps a failure, too: the tests of a failed run fail at once, none tries it again."""

    @functools.cache
    def outcome(*args: Any, **kwargs: Any) -> tuple[T | None, Exception | None]:
        try:
            return run(*args, **kwargs), None
        except Exception as error:  # noqa: BLE001  (raised again below)
            return None, error

    @functools.wraps(run)
    def shared(*args: P.args, **kwargs: P.kwargs) -> T:
        value, error = outcome(*args, **kwargs)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    return shared
