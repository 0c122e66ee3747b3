"""Standard streams that cannot be written."""

import subprocess
import sys

PRINTS = """
import sys
from megatron_tlt.cli.streams import drop_unwritable
drop_unwritable("stdout")
for _ in range(3):
    print("a line of a step", flush=True)
print("the last one")
"""


def test_output_for_which_there_is_no_room_is_dropped_after_one_warning():
    """/dev/full fails like a full disk, also when Python flushes at its exit."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", PRINTS], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 0
    assert done.stderr == "megatron-tlt: output cannot be written and is dropped: No space left on device\n"
    kept = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True, timeout=60, check=True)
    assert kept.stdout == "a line of a step\n" * 3 + "the last one\n" and kept.stderr == ""
