"""One rank of a run whose every duration is CPU seconds of its main thread: for a machine that others share.

    mpiexec -n 2 python -m mpi4py benchmarks/lib/sim_worker.py train configs/quickstart.yaml ...

Phases in the event log then do not count what other processes took, nor waiting: `idle` is empty. For figures only.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

time.perf_counter = time.thread_time
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if __name__ == "__main__":
    from megatron_tlt.cli.main import main

    sys.exit(main(sys.argv[1:]))
