"""SIGUSR1 and SIGTERM are kept from children from their first instruction on."""

import signal
import subprocess
import sys

import pytest

from megatron_tlt.workers.child_signals import signals_blocked

CHILD = """
import subprocess, sys, time
from megatron_tlt.workers.child_signals import unblock_signals
if sys.argv[1] == "unblocked":
    unblock_signals()
print("ready", flush=True)
sys.stdin.readline()
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
grandchild.terminate()
print(grandchild.wait() if sys.argv[1] == "unblocked" else "alive", flush=True)
grandchild.kill()
"""


@pytest.mark.parametrize(("how", "end"), [("masked", "alive"), ("unblocked", str(-signal.SIGTERM))])
def test_a_child_outlives_the_signals_and_an_unblocked_ones_children_get_them(how, end):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with signals_blocked():
        child = subprocess.Popen([sys.executable, "-c", CHILD, how], **pipes)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        child.send_signal(number)  # before its first instruction
    assert child.stdout.readline() == "ready\n"
    for number in (signal.SIGUSR1, signal.SIGTERM):
        child.send_signal(number)
    assert child.communicate("go\n", timeout=60)[0] == f"{end}\n"
    assert child.returncode == 0
