"""A benchmark's side in a process of its own: engines need other environments, and must not share a heap or threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any


def serve(load: Callable[[], Callable[[Any], Any]]) -> None:
    """The child's main loop: loads a side, then answers each JSON line of work with one, until stdin ends."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print to stdout; only results go to the parent
    run = load()
    print('"ready"', file=channel, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=channel, flush=True)


class Child:
    """The parent's end of a process that calls `serve`."""

    def __init__(self, name: str, command: list[str], threads: int, environment: Mapping[str, str]):
        """Returns when the side is loaded. Raises SystemExit with the end of its output if it dies."""
        self.name = name
        limits = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the process)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **limits, **environment},
        )
        self._read()

    def run(self, work: Any) -> Any:
        """The side's response to `work`, both JSON. Raises SystemExit as above."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"{self.name} ended:\n{self._log.read()[-4000:]}")
        return json.loads(line)
