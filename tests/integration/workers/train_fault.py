"""`megatron-tlt train` with a fault on one rank. argv: a JSON object (see `Fault`), then the command's arguments."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_tlt.cli import main as cli
from megatron_tlt.trainer.metrics import RunMetrics


@dataclass
class Fault:
    """What happens to `rank` when it is in `phase` of `step`."""

    rank: int
    phase: str
    step: int
    kind: str

    def happen(self, world: Any) -> None:
        """Does not return, but for SIGSTOP after a SIGCONT."""
        if self.kind.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[self.kind])
        elif self.kind == "spin":
            while True:
                pass
        elif self.kind == "regex":  # holds the GIL for ever
            re.match(r"(a+)+$", "a" * 60 + "b")
        elif self.kind == "mpi":
            world.comm.recv(source=world.rank, tag=77)
        elif self.kind.startswith("/"):  # until this file is there
            while not os.path.exists(self.kind):
                time.sleep(0.05)
        else:
            raise ValueError(self.kind)


def inject(fault: Fault) -> None:
    """From now on the fault waits to happen."""
    plain = RunMetrics.phase

    @contextmanager
    def phase(self: Any, name: str) -> Iterator[None]:
        with plain(self, name):
            if (self.world.rank, name, self.state.step) == (fault.rank, fault.phase, fault.step):
                fault.happen(self.world)
            yield

    RunMetrics.phase = phase


inject(Fault(**json.loads(sys.argv[1])))
sys.exit(cli.main(sys.argv[2:]))
