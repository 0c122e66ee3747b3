"""Small files for the batch script that started this job: its exit code and its newest checkpoint.

Some launchers do not return the ranks' exit code (srun with --kill-on-bad-exit reports 137 whenever ranks leave through
MPI_Abort). So the code and the steps of checkpoints are also written into the directory that MEGATRON_TLT_ATTEMPT
names; without the variable nothing is written.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron_tlt.observe.files import write_atomically

VARIABLE = "MEGATRON_TLT_ATTEMPT"


def note_exit(code: int) -> None:
    """Writes the code with which the job is to end."""
    _note("exit", code)


def note_start(step: int) -> None:
    """Writes the step from which this start continues."""
    _note("start", step)


def note_checkpoint(step: int) -> None:
    """Writes the newest complete checkpoint's step, by which the batch script sees progress."""
    _note("checkpoint", step)


def _note(name: str, value: int) -> None:
    if directory := os.environ.get(VARIABLE):
        try:
            write_atomically(Path(directory) / name, [str(value)])
        except OSError as error:  # must not change how the job ends
            print(f"megatron-tlt: {name} = {value} cannot be noted: {error}", file=sys.stderr, flush=True)
