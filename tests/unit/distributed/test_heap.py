"""What MPI finds in memory when it starts: nothing of what the process did before."""

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


def test_a_new_block_lies_among_zeros():
    done = subprocess.run([sys.executable, "-c", NEIGHBOURS], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    there, thread, here = done.stdout.split()
    assert thread == "mpi-start" and float(there) > 0.9
    assert float(here) < 0.6  # as ever


def test_what_goes_wrong_is_raised():
    with pytest.raises(ImportError, match="no library"):
        on_clean_heap(lambda: (_ for _ in ()).throw(ImportError("no library")))
