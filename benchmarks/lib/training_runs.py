"""Training runs of a benchmark: each a job of its own under mpiexec; their rows of metrics and what they computed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from lib.bench_record import ROOT

Rows = list[dict[str, Any]]
QUIET = ["checkpoint.resume=never", "eval.every=0", "observe.tensorboard=false", "observe.progress=none"]


def launch(ranks: int, command: list[str]) -> str:
    """Runs `command` on ranks of one thread each; its output. Ends the benchmark if it fails."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    bind = ["-bind-to", "core"] if ranks <= (os.cpu_count() or 1) else []
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    whole = [mpiexec, *bind, "-n", str(ranks), sys.executable, "-m", "mpi4py", *command]
    done = subprocess.run(whole, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(whole)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def train(folder: Path, config: Path, steps: int, ranks: int, options: list[str], *, every: int = 0) -> Rows:
    """A run of `steps` steps into `folder`, a checkpoint each `every` of them; all its rows of metrics."""
    shutil.rmtree(folder, ignore_errors=True)
    overrides = [
        f"train.num_steps={steps}",
        f"train.run_dir={folder}",
        f"checkpoint.every={every}",
        f"cluster.ranks_per_node={ranks}",
        *QUIET,
        *options,
    ]
    launch(ranks, ["-m", "megatron_tlt", "train", str(config), *overrides])
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if "time/step" in row]


def digests(folder: Path, steps: int) -> dict[str, str]:
    """What a run computed: digests of all responses (tokens), all rewards, and every tensor of its last checkpoint."""
    sys.path.insert(0, str(ROOT))
    from tests.helpers.runs import checkpoint_tensors

    rows = list(map(json.loads, (folder / "rollouts.jsonl").read_text().splitlines()))
    weights = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(checkpoint_tensors(folder / f"checkpoints/step-{steps:06d}").items()):
        weights.update(name.encode() + tensor.contiguous().view(-1).numpy().tobytes())
    found = {name: "-".join(str(row[name]) for row in rows) for name in ("responses", "rewards")}
    return {**found, "weights": weights.hexdigest()}
