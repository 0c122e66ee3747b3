"""The inside of a worker: a process that reads one request at a time from its pipe and answers it.

This module imports no numpy: a worker limits numpy's threads first.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Collection, Mapping
from multiprocessing.connection import Connection
from typing import Any, Protocol

from megatron_tlt.errors import TltError, error_line
from megatron_tlt.workers.child_signals import sigterm_ends_forks
from megatron_tlt.workers.descendants import keep
from megatron_tlt.workers.process import end_if_full, limit_memory, note_loaded, set_up
from megatron_tlt.workers.user_code import check_unchanged


class Host(Protocol):
    """What holds the user's code in a worker."""

    def answer(self, request: Any) -> object:
        """The answer to a request; may raise anything."""


def serve(
    pipe: Connection,
    make_host: Callable[[], Host],
    code: Mapping[str, str],
    memory_mib: int,
    rank: int,
    cpus: Collection[int] = (),
) -> None:
    """The process, see `Worker`. `rank`: process id of the parent; `cpus`: see `set_up`.

    First sends None, or why it cannot begin: `code` has changed, or `make_host` failed. Then answers with (True, value)
    or (False, why). Ends with the pipe.
    """
    set_up(rank, cpus)
    keep(rank)
    sigterm_ends_forks()
    multiprocessing.current_process().daemon = False  # a daemon, as which the rank has started it, may start no process
    limit_memory(memory_mib)
    try:
        check_unchanged(code)
        host = make_host()
    except BaseException as error:  # noqa: BLE001  a user's module may raise anything
        pipe.send(str(error) if isinstance(error, TltError) else error_line(error))
        return
    note_loaded()
    pipe.send(None)
    try:
        while True:
            is_good, value = _answered(host, pipe.recv())
            if not is_good:
                end_if_full(str(value))
            pipe.send((is_good, value))
    except (EOFError, OSError):  # the rank has closed its end
        return


def _answered(host: Host, request: Any) -> tuple[bool, object]:
    try:
        return True, host.answer(request)
    # A user's code may raise anything, even KeyboardInterrupt, which no terminal sends here.
    except BaseException as error:  # noqa: BLE001
        return False, str(error) if isinstance(error, TltError) else error_line(error)
