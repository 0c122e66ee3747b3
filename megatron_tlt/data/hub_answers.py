"""Answers of the hub, each within a limit: huggingface_hub waits for some without any.

An endpoint that was silent is not asked again by this process, which then takes what is in the cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FuturesTimeoutError
from threading import Thread
from typing import TypeVar

T = TypeVar("T")

SAY_S = 3.0  # until the wait for an answer is said
COMMIT_S, FILES_S = 20.0, 60.0  # limits of an answer about a commit, and about all files of a name
_silent: set[str] = set()


def is_silent(endpoint: str) -> bool:
    """Whether the hub has not answered this process, so that only the cache is read."""
    return endpoint in _silent


def answer(endpoint: str, about: str, ask: Callable[[], T], limit_s: float) -> T:
    """What `ask` returns, which asks about `about`, in a thread. It is called again, for the cache alone, if the
    hub is silent for `limit_s` seconds. Raises what `ask` raises.
    """
    if is_silent(endpoint):
        return ask()
    future: Future[T] = Future()

    def wait() -> None:
        try:
            future.set_result(ask())
        except Exception as error:  # noqa: BLE001  the caller raises it
            future.set_exception(error)

    Thread(target=wait, daemon=True).start()  # left behind if the hub is silent
    for seconds, words in (
        (SAY_S, f"waits for the hub's answer about {about}, {limit_s:g} s at most"),
        (limit_s - SAY_S, f"the hub has not answered about {about}: from now on only the cache is read"),
    ):
        try:
            return future.result(seconds)
        except FuturesTimeoutError:
            if future.done():  # an error of `ask`
                raise
        print(f"megatron-tlt: {words}", file=sys.stderr, flush=True)
    _silent.add(endpoint)
    return ask()
