"""How workers start, and what they take."""

import signal
import subprocess
import sys

import pytest

LOADED = """
from megatron_tlt.workers.process import end_if_full, limit_memory, note_loaded

limit_memory(2048)
index = bytes(1300 << 20)  # of a tool: loaded once, and no page of it is written
note_loaded()
for failure in ("MemoryError", "RuntimeError: out of memory"):
    end_if_full(failure)
print("lives", flush=True)
kept = bytes(500 << 20)
end_if_full("KeyError: 'memory'")
print("lives", flush=True)
end_if_full("DefaultCPUAllocator: can't allocate memory. Error code 12 (Cannot allocate memory)")
"""


def test_what_was_loaded_ends_no_worker_and_what_stayed_taken_does() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("lives\nlives\n", 12)


FIRST = """
import multiprocessing, signal
from megatron_tlt.workers.process import WorkerProcess

if __name__ == "__main__":
    process = WorkerProcess(target=signal.pthread_sigmask, args=(signal.SIG_BLOCK, ()))
    process.start()  # the resource tracker starts with it, which unblocks what is blocked
    print(open(f"/proc/{process.pid}/status").read().partition("SigBlk:")[2].split()[0])
    process.join()
"""


HASHES = """
import os
from megatron_tlt.workers.process import WorkerProcess
from megatron_tlt.workers.worker import Worker

if __name__ == "__main__":
    Worker(int, {}, 0, 0.0)
    os.putenv = os.unsetenv = None  # from here on another thread may be reading the environment
    for _ in range(2):
        process = WorkerProcess(target=exec, args=("print(hash('a'), flush=True)",))
        process.start()
        process.join()
"""


@pytest.mark.parametrize("seed", [None, "7", "random"])
def test_a_text_has_the_same_hash_in_each_worker_unless_the_user_wants_it_otherwise(seed, monkeypatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    done = subprocess.run([sys.executable, "-c", HASHES], capture_output=True, text=True, check=True)
    one, other = done.stdout.split()
    assert (one == other) == (seed != "random")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_the_first_worker_too_starts_with_signals_blocked(number) -> None:
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True)
    assert int(done.stdout, 16) & (1 << number - 1)
