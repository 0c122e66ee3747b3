"""MPI's start, with a stand-in for mpi4py that waits for ranks that do not come."""

import os
import subprocess
import sys

# As MPI_Init: in C, without letting go of the GIL, so that no line of Python runs meanwhile.
WAITS = "import ctypes\nctypes.PyDLL(None).sleep(60)\n"
START = """
from megatron_tlt.distributed.mpi import bounded_start, start_mpi
with bounded_start(0.2):
    start_mpi()
"""


def test_a_start_without_the_other_ranks_ends_with_its_stack(tmp_path):
    """One host that does not come would hold all others, without a word, to the job's end."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("class rc: pass\n")
    (package / "MPI.py").write_text(WAITS)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", START], env=environment, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert done.stderr.startswith("Timeout (") and " in _wait_for_all_ranks_in_mpi_init\n" in done.stderr
