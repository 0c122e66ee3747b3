"""Python code as a tool, run in a process of its own with limits of CPU, memory, files and network.

The limits protect from accidents (a loop without end, a large file), not from malice: the code reads every file that
this user may read, and nothing keeps it from the kernel's interfaces. Against malice a container around the whole run
is needed. Where Linux refuses user namespaces (containers often do), the code reaches the network.

`random`, torch's generator and numpy's global one, from which pandas, scipy and scikit-learn draw, are seeded;
`os.urandom`, `secrets` and `numpy.random.default_rng()` are not. Addresses of objects in printed texts become 0x0.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress

from megatron_tlt.types import Prompt
from megatron_tlt.workers.process import ONE_THREAD
from megatron_tlt.workers.scratch import ScratchDirectory

# CLONE_NEWUSER | CLONE_NEWNET: no network but a dead loopback. Refused on some machines.
_UNSHARE = "unshare(0x10000000 | 0x40000000)"
# Of an object in its repr, another one in every process. A shorter number is the program's own.
_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}\b")
# Runs first in the process: limits and seeds, then the code from stdin.
_START = f"""
import os, random, re, resource, sys
cpu, memory, files, seed = map(int, sys.argv[1:5])
for kind, limit in ((resource.RLIMIT_CPU, cpu), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, files),
                    (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(kind, (limit, limit))
try:
    import ctypes
    libc = ctypes.CDLL(None)
    libc.{_UNSHARE}
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG, after the new user namespace, which clears it: ends with a killed worker
except Exception:
    pass
sys.argv = ["code"]
code = sys.stdin.read()
random.seed(seed)
if any(name in code for name in ("numpy", "pandas", "scipy", "sklearn")):
    try:
        import numpy
        numpy.random.seed(seed)
    except Exception:
        pass
if re.search(r"(?m)^\\s*(from\\s+torch\\b|import\\s[^#]*\\btorch\\b)", code):  # its import takes seconds
    try:
        import torch
        torch.manual_seed(seed)
    except Exception:
        pass
exec(compile(code, "code", "exec"), {{"__name__": "__main__"}})
"""


def network_warning() -> str | None:
    """That programs reach the network here, where Linux refuses user namespaces. Starts a process."""
    test = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).{_UNSHARE} != 0)"
    if subprocess.run([sys.executable, "-I", "-c", test], check=False, capture_output=True).returncode == 0:
        return None
    return "env.kind python: Linux refuses user namespaces here, so programs of the model reach the network"


class Python:
    """`python`, for prompts that another reward function judges. Each call is a program of its own."""

    def __init__(self, cpu_s: int = 5, wall_s: float = 15.0, memory_mib: int = 1024, output_kib: int = 64):
        """`cpu_s`: CPU seconds of a call; `wall_s`: seconds of all calls of a turn together; `output_kib`: of printed
        text, and of each file that a program writes.
        """
        self._cpu_s, self._wall_s = cpu_s, wall_s
        self._memory, self._output = memory_mib << 20, output_kib << 10
        self._seconds_left = wall_s
        self._seed = self._calls = 0

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Seeds the programs of a trajectory, each with another seed."""
        self._seed, self._calls = seed, 0

    def begin_turn(self) -> None:
        """The calls of a turn follow."""
        self._seconds_left = self._wall_s

    def python(self, code: str) -> str:
        """
        Runs a Python program and returns the text that it prints. Nothing is kept between calls.

        Args:
            code: The program.

        Returns:
            The printed text, with the last line of the error message if the program fails.
        """
        self._calls += 1
        if self._seconds_left <= 0:
            return f"error: {self._late}"
        # Into a file, whose size the limit bounds as that of others.
        with closing(ScratchDirectory()) as scratch, tempfile.TemporaryFile() as printed:
            folder = str(scratch.path)
            why = self._run(code, folder, printed.fileno())
            printed.seek(0)
            text = printed.read(self._output).decode(errors="replace")
        lines = _ADDRESS.sub(" at 0x0", text.replace(folder, ".")).splitlines()
        if why is None and "Traceback (most recent call last):" in lines:
            start = len(lines) - 1 - lines[::-1].index("Traceback (most recent call last):")
            lines[start:] = [f"error: {lines[-1]}"]
        return "\n".join([*lines, *([f"error: {why}"] if why else [])]) or "(nothing was printed)"

    @property
    def _late(self) -> str:
        """The same whatever time was left: an answer should not depend on the machine's speed."""
        return f"no end within {self._wall_s:g} s, which the calls of a turn share"

    def _run(self, code: str, folder: str, printed: int) -> str | None:
        """Why the program was ended; None: it ended by itself."""
        command = [sys.executable, "-s", "-P", "-B", "-u", "-c", _START]
        seed = (self._seed + self._calls) % (1 << 32)  # numpy takes 32 bits
        started = time.monotonic()
        process = subprocess.Popen(
            [*command, *map(str, (self._cpu_s, self._memory, self._output, seed))],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=printed,
            cwd=folder,
            # The same order of sets every time; nothing of the rank's environment, in which there may be secrets. One
            # thread, since numpy reserves memory for each, which on a large machine is more than the limit.
            env={"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8", "PATH": os.defpath, "HOME": folder, **ONE_THREAD},
            start_new_session=True,
        )
        try:
            process.communicate(code.encode(), timeout=self._seconds_left)
        except subprocess.TimeoutExpired:
            return self._late
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._seconds_left -= time.monotonic() - started
        if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return f"more than {self._cpu_s} s of CPU time"
        return f"ended by signal {-process.returncode}" if process.returncode < 0 else None
