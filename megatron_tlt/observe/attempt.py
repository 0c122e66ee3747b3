"""Notes for the batch script that started this job: what came of it, where exit codes get lost on the way.

A launcher that kills the others when the first rank leaves reports 137 instead of that rank's code (measured: srun with
--kill-on-bad-exit, whenever ranks leave through MPI_Abort). So the code and the newest checkpoint are also written
into small files of the directory that MEGATRON_TLT_ATTEMPT names; without it nothing is written.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron_tlt.observe.jsonl import write_atomically

VARIABLE = "MEGATRON_TLT_ATTEMPT"


def note(name: str, value: int) -> None:
    """Writes `value` into the file `name`, whole or not at all; a disk that cannot take it costs a line on stderr."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        return
    try:
        write_atomically(Path(directory) / name, [str(value)])
    except OSError as error:  # told on the way out, too: it must not change how the job ends
        print(f"megatron-tlt: {name} = {value} cannot be noted: {error}", file=sys.stderr, flush=True)


def note_exit(code: int) -> None:
    """The code that this rank wants the job to end with."""
    note("exit", code)


def note_start(step: int) -> None:
    """The step that this start goes on from."""
    note("start", step)


def note_checkpoint(step: int) -> None:
    """The newest complete checkpoint's step: what the batch script takes for progress."""
    note("checkpoint", step)
