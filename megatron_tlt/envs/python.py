"""Python code as a tool, run in a process of its own with limits of CPU, memory, files and network.

The limits protect from accidents (a loop without end, a large file), not from malice: the code reads every file that
this user may read, and nothing keeps it from the kernel's interfaces. Against malice a container around the whole run
is needed. Where Linux refuses user namespaces (containers often do), the code reaches the network.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

# Runs first in the process: limits, then the code from stdin. `unshare` is refused on some machines.
_START = """
import os, resource, sys
cpu, memory, files = map(int, sys.argv[1:4])
for kind, limit in ((resource.RLIMIT_CPU, cpu), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, files),
                    (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(kind, (limit, limit))
try:
    import ctypes
    libc = ctypes.CDLL(None)
    libc.unshare(0x10000000 | 0x40000000)  # CLONE_NEWUSER | CLONE_NEWNET: no network but a dead loopback
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG, after the new user namespace, which clears it: ends with a killed worker
except Exception:
    pass
sys.argv = ["code"]
exec(compile(sys.stdin.read(), "code", "exec"), {"__name__": "__main__"})
"""


class Python:
    """`python`, for prompts that another reward function judges. Each call is a program of its own."""

    def __init__(self, cpu_s: int = 5, wall_s: float = 15.0, memory_mib: int = 1024, output_kib: int = 64):
        """`cpu_s`, `wall_s`: seconds of a call; `output_kib`: of printed text, and of each file that it writes."""
        self._cpu_s, self._wall_s = cpu_s, wall_s
        self._memory, self._output = memory_mib << 20, output_kib << 10

    def python(self, code: str) -> str:
        """
        Runs a Python program and returns the text that it prints. Nothing is kept between calls.

        Args:
            code: The program.

        Returns:
            The printed text, with the last line of the error message if the program fails.
        """
        # Into a file, whose size the limit bounds as that of others.
        with tempfile.TemporaryDirectory(prefix="python-tool-") as folder, tempfile.TemporaryFile() as printed:
            why = self._run(code, folder, printed.fileno())
            printed.seek(0)
            text = printed.read(self._output).decode(errors="replace")
        lines = text.replace(folder, ".").splitlines()
        if why is None and "Traceback (most recent call last):" in lines:
            start = len(lines) - 1 - lines[::-1].index("Traceback (most recent call last):")
            lines[start:] = [f"error: {lines[-1]}"]
        return "\n".join([*lines, *([f"error: {why}"] if why else [])]) or "(nothing was printed)"

    def _run(self, code: str, folder: str, printed: int) -> str | None:
        """Why the program was ended; None: it ended by itself."""
        command = [sys.executable, "-s", "-P", "-B", "-u", "-c", _START]
        process = subprocess.Popen(
            [*command, str(self._cpu_s), str(self._memory), str(self._output)],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=printed,
            cwd=folder,
            # The same order of sets every time; nothing of the rank's environment, in which there may be secrets.
            env={"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8", "PATH": os.defpath, "HOME": folder},
            start_new_session=True,
        )
        try:
            process.communicate(code.encode(), timeout=self._wall_s)
        except subprocess.TimeoutExpired:
            return f"no end within {self._wall_s:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return f"more than {self._cpu_s} s of CPU time"
        return f"ended by signal {-process.returncode}" if process.returncode < 0 else None
