"""Freed pages are reused; MPI finds nothing in memory, when it starts, of what the process did before."""

import subprocess
import sys

import pytest

from megatron_tlt.distributed.heap import on_clean_heap
from tests.helpers.mpi import ROOT

# In a process of its own: what other tests' threads have left is not the matter here.
NEIGHBOURS = """
import ctypes, threading
from megatron_tlt.distributed.heap import on_clean_heap
from tests.helpers.heap import dirty, libc

def zeros():
    around = ctypes.string_at(libc.malloc(1200), 1200 + 4096)  # a new block and what lies behind it
    return around.count(0) / len(around)

dirty(1200)
earlier = threading.Thread(target=dirty, args=(1200, 400, False))  # its memory is the next thread's
earlier.start()
earlier.join()
found = []
on_clean_heap(lambda: found.append((zeros(), threading.current_thread().name)))
print(*found[0], zeros())
"""

# Page faults of a second block of 64 MiB, which is above every threshold of glibc, and of one beside it.
FAULTS = """
import ctypes, resource
from megatron_tlt.distributed.heap import keep_freed_pages
from tests.helpers.heap import libc

def faults(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = [faults(64 << 20) for _ in range(2)]
keep_freed_pages()
print(usual[1], *(faults(size) for size in (64 << 20, 64 << 20, 32 << 20)))
"""


def test_freed_pages_are_reused():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    usual, first, again, smaller = map(int, done.stdout.split())
    assert min(usual, first) > 10_000  # of 16,384 pages
    assert max(again, smaller) < 100


def test_a_new_block_lies_among_zeros():
    done = subprocess.run([sys.executable, "-c", NEIGHBOURS], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    there, thread, here = done.stdout.split()
    assert thread == "mpi-start" and float(there) > 0.9
    assert float(here) < 0.6  # as ever


def test_what_goes_wrong_is_raised():
    with pytest.raises(ImportError, match="no library"):
        on_clean_heap(lambda: (_ for _ in ()).throw(ImportError("no library")))
