"""What MPI finds in memory when it starts: nothing of what the process did before."""

import ctypes
import threading

import pytest

from megatron_tlt.distributed.heap import on_fresh_heap
from tests.helpers.heap import dirty, libc

SIZE, BEHIND = 1200, 4096


def neighbourhood():
    """A new block, and what lies behind it."""
    return ctypes.string_at(libc.malloc(SIZE), SIZE + BEHIND)


def test_a_new_block_lies_among_zeros():
    dirty(SIZE)
    found = []
    on_fresh_heap(lambda: found.append((neighbourhood(), threading.current_thread().name)))
    content, thread = found[0]
    assert thread == "mpi-start" and content.count(0) > 0.95 * len(content)
    assert neighbourhood().count(0) < 0.5 * len(content)  # here as ever


def test_what_goes_wrong_is_raised():
    with pytest.raises(ImportError, match="no library"):
        on_fresh_heap(lambda: (_ for _ in ()).throw(ImportError("no library")))
