"""The standard streams of a command: closed ones are opened, and output that cannot be written ends no training."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def open_closed_streams() -> None:
    """Opens /dev/null in place of standard streams that services and cron have closed (`>&-`): the next file that is
    opened would get the number of one, and all output with it. Characters that standard output cannot encode become
    "?": they must not end a run.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)  # the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def drop_unwritable(name: str) -> None:
    """From now on what cannot be written to `sys.stdout` or `sys.stderr` is dropped, after one warning on stderr."""
    stream = getattr(sys, name)
    if stream is getattr(sys, f"__{name}__"):  # not a test's
        stream.flush()
        raw = io.BufferedWriter(_Dropping(stream.fileno(), "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True))


class _Dropping(io.FileIO):
    """A file whose writes do not fail: on a full disk, at a closed terminal or pipe they are dropped."""

    _has_warned = False

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                text = f"megatron-tlt: output cannot be written and is dropped: {error.strerror}\n"
                with suppress(OSError):
                    os.write(2, text.encode())
            return memoryview(data).nbytes
