"""Training runs of a benchmark: each a job of its own under mpiexec; their rows of metrics and what they computed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lib.bench_record import LARGE_PAGES, ROOT

from megatron_tlt.distributed.launch import ON_THIS_MACHINE

Rows = list[dict[str, Any]]
QUIET = ["eval.every=0", "observe.tensorboard=false", "observe.progress=none"]


def launch(ranks: int, command: list[str], shows: bool = False) -> str:
    """Runs `command` on ranks of one thread each; its output. Ends the benchmark if it fails. `shows`: prints the
    output line by line.
    """
    env = {**os.environ, **LARGE_PAGES, **ON_THIS_MACHINE, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    bind = ["-bind-to", "core"] if ranks <= (os.cpu_count() or 1) else []
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    whole = [mpiexec, *bind, "-n", str(ranks), sys.executable, "-m", "mpi4py", *command]
    with tempfile.TemporaryFile("w+") as errors:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT if shows else errors}
        with subprocess.Popen(whole, env=env, cwd=ROOT, text=True, **pipes) as job:
            assert job.stdout is not None
            lines = []
            for line in job.stdout:
                lines.append(line)
                if shows:
                    print(f"    {line.rstrip()}", flush=True)
        output = "".join(lines)
        if job.returncode:
            errors.seek(0)
            raise SystemExit(f"{' '.join(whole)} ended with {job.returncode}:\n{output}{errors.read()}")
    return output


def train(
    folder: Path,
    config: Path,
    steps: int,
    ranks: int,
    options: list[str],
    *,
    every: int = 0,
    shows: bool = False,
    goes_on: bool = False,
) -> Rows:
    """A run of `steps` steps into `folder`, a checkpoint each `every` of them; its rows of metrics, one a step.

    `shows`: prints a line a step. `goes_on`: from the checkpoint that is there, not anew.
    """
    if not goes_on:
        shutil.rmtree(folder, ignore_errors=True)
    overrides = [
        f"train.num_steps={steps}",
        f"train.run_dir={folder}",
        f"checkpoint.every={every}",
        f"cluster.ranks_per_node={ranks}",
        *QUIET,
        *options,
        f"checkpoint.resume={'auto' if goes_on else 'never'}",
    ]
    if shows:
        overrides.append("observe.progress=plain")
    launch(ranks, ["-m", "megatron_tlt", "train", str(config), *overrides], shows)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if "time/step" in row]


def digests(folder: Path, steps: int) -> dict[str, str]:
    """What a run computed: digests of all responses (tokens), all rewards, and every tensor of its last checkpoint."""
    sys.path.insert(0, str(ROOT))
    import torch

    from tests.helpers.runs import checkpoint_tensors

    rows = list(map(json.loads, (folder / "rollouts.jsonl").read_text().splitlines()))
    weights = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(checkpoint_tensors(folder / f"checkpoints/step-{steps:06d}").items()):
        weights.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    found = {name: "-".join(str(row[name]) for row in rows) for name in ("responses", "rewards")}
    return {**found, "weights": weights.hexdigest()}
