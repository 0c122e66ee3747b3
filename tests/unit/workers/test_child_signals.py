"""SIGUSR1, SIGTERM and Ctrl-C are kept from children from their first instruction on."""

import signal
import subprocess
import sys

import pytest

from megatron_tlt.workers.child_signals import signals_blocked

CHILD = """
import os, signal, subprocess, sys, time
from megatron_tlt.workers.child_signals import sigterm_ends_forks, unblock_signals
if sys.argv[1] == "unblocked":
    unblock_signals()
print("ready", flush=True)
sys.stdin.readline()
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
grandchild.terminate()
print(grandchild.wait() if sys.argv[1] == "unblocked" else "alive", flush=True)
grandchild.kill()
"""
FORK = (
    CHILD[: CHILD.index("grandchild")]
    + """
sigterm_ends_forks()
fork = os.fork()
if fork == 0:
    time.sleep(60)
    os._exit(0)
os.kill(fork, signal.SIGUSR1)
os.kill(fork, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
"""
)


@pytest.mark.parametrize(
    ("program", "how", "end"),
    [
        (CHILD, "masked", "alive"),
        (CHILD, "unblocked", str(-signal.SIGTERM)),
        (FORK, "unblocked", str(-signal.SIGTERM)),  # and not of SIGUSR1
    ],
)
def test_a_child_outlives_the_signals_and_an_unblocked_ones_children_get_them(program, how, end):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with signals_blocked():
        child = subprocess.Popen([sys.executable, "-c", program, how], **pipes)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        child.send_signal(number)  # before its first instruction
    assert child.stdout.readline() == "ready\n"
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        child.send_signal(number)
    assert child.communicate("go\n", timeout=60)[0] == f"{end}\n"
    assert child.returncode == 0
