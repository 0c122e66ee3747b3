"""Kill a run with SIGKILL at random moments, again and again, resuming it each time; compare with a run left alone.

One process imports everything once and forks every attempt, so that an attempt spends its time in loading, steps and
saves and not in imports. An attempt is one rank with the whole program: lock, checkpoints in the background every two
steps, rollout cache, evaluation, metrics. A quarter of the kills come at any moment of the start, the others at any
moment of the steps after it; its phase is read from memory shared with its parent. The last attempt is not killed and
makes a few more steps. Then another run makes as many steps without a break.

    python tests/integration/workers/random_kills.py --folder DIR [--kills 6] [--seed 0]

Prints a row as JSON; exits with 1 if the runs differ.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import mmap
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

WHILE_STARTING = 0.25  # share of kills at any moment of the start; the others come when the first rollout has begun
# Not mpi4py: it starts MPI when it is imported, which every attempt must do for itself.
MODULES = (
    "megatron_tlt.cli.main",
    "megatron_tlt.trainer.setup",
    "megatron_tlt.trainer.loop",
    "megatron_tlt.actor.policy",
    "transformers",
)


def attempt(
    config: Path, overrides: list[str], seconds: float | None, log: Path, after: str | None = None
) -> tuple[int, str]:
    """Forks a run; kills it `seconds` after its start, or after it came to phase `after`. Status and last phase."""
    board = mmap.mmap(-1, 64)
    child = os.fork()
    if not child:
        run_forked(config, overrides, board, log)
    started = time.monotonic() if after is None else None
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        phase = board[:64].rstrip(b"\0").decode()
        if done:
            return os.waitstatus_to_exitcode(status), phase
        if started is None and phase == after:
            started = time.monotonic()
        if seconds is not None and started is not None and time.monotonic() - started >= seconds:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.001)


def run_forked(config: Path, overrides: list[str], board: mmap.mmap, log: Path) -> None:
    """The child: one rank of `megatron-tlt train`; never returns."""
    from megatron_tlt.cli.main import main
    from megatron_tlt.distributed.world import World

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    enter = World.enter

    def enter_and_tell(self: Any, phase: str, step: int | None = None) -> None:
        board[:64] = phase.encode()[:64].ljust(64, b"\0")
        enter(self, phase, step)

    World.enter = enter_and_tell  # type: ignore[method-assign]
    code = 1
    try:
        code = main(["train", str(config), *overrides])
    finally:
        sys.stdout.flush()
        os._exit(code)


def write_run(folder: Path) -> Path:
    """The smallest run that uses every part."""
    from tests.helpers.runs import write_config

    return write_config(
        folder,
        train={"prompts_per_step": 8, "run_dir": str(folder / "left_alone")},
        rollout={"samples_per_prompt": 4, "max_tokens": 16, "max_running_requests": 8},
        checkpoint={"every": 2, "keep": 2},
        eval={"every": 10, "num_prompts": 4, "samples_per_prompt": 1},
        rewards={"functions": [{"name": "format", "pattern": ".*[aeiou].*", "threshold": 0.5}]},
        cluster={"ranks_per_node": 1},
    )


def steps_done(run_dir: Path) -> int:
    """Steps in the newest complete checkpoint."""
    with contextlib.suppress(FileNotFoundError):
        return int((run_dir / "checkpoints/latest").read_text().strip().removeprefix("step-"))
    return 0


def kill_and_resume(config: Path, run_dir: Path, kills: int, rng: random.Random, log: Path) -> dict[str, Any]:
    """`kills` killed attempts and one that is not; returns their outcomes."""
    phases: Counter[str] = Counter()
    endless = [f"train.run_dir={run_dir}", "train.num_steps=1000000"]
    started = time.monotonic()
    checked(attempt(config, endless, 0.0, log, after="rollout")[0], log)
    usual = time.monotonic() - started
    progressed = 0
    for number in range(kills):
        before = steps_done(run_dir)
        after = None if rng.random() < WHILE_STARTING else "rollout"
        code, phase = attempt(config, endless, rng.uniform(0.0, usual), log, after)
        checked(code, log)
        phases[phase or "start"] += 1
        progressed += steps_done(run_dir) > before
        if number % 20 == 19:
            print(f"{number + 1} kills, step {steps_done(run_dir)}", file=sys.stderr, flush=True)
    num_steps = steps_done(run_dir) + 4
    code, _ = attempt(config, [*endless, f"train.num_steps={num_steps}"], None, log)
    checked(code, log, wanted=0)
    return {
        "resumes": kills + 1,
        "num_steps": num_steps,
        "progressed": progressed,
        "phases": dict(phases.most_common()),
    }


def checked(code: int, log: Path, wanted: int = -signal.SIGKILL) -> None:
    """Ends the program if an attempt ended with another code than expected."""
    if code != wanted:
        raise SystemExit(f"an attempt ended with {code}, not {wanted}:\n{log.read_text()[-3000:]}")


def compare(left: Path, right: Path, num_steps: int) -> dict[str, Any]:
    """Weights, moments and the metrics that do not measure time, bit by bit."""
    import torch

    from tests.helpers.runs import checkpoint_tensors, rows

    last = f"checkpoints/step-{num_steps:06d}"
    a, b = checkpoint_tensors(left / last), checkpoint_tensors(right / last)
    different = sorted(name for name in a.keys() | b.keys() if name not in a or not torch.equal(a[name], b[name]))
    keep = ("step", "reward/mean", "length/mean", "policy/loss", "policy/grad_norm")
    metrics = [[{name: row.get(name) for name in keep} for row in rows(run)] for run in (left, right)]
    return {
        "tensors": len(a),
        "different": different,
        "same_metrics": metrics[0] == metrics[1] and len(metrics[0]) == num_steps,
        "reused": sum(row["rollout_cache/reused"] for row in rows(right)),
        "left_in_cache": (right / "rollout_cache").exists(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True, help="where the runs go")
    args = parser.parse_args()
    for module in MODULES:
        importlib.import_module(module)
    args.folder.mkdir(parents=True, exist_ok=True)
    config, log = write_run(args.folder), args.folder / "log.txt"
    row = kill_and_resume(config, args.folder / "killed", args.kills, random.Random(args.seed), log)
    num_steps = row["num_steps"]
    checked(attempt(config, [f"train.num_steps={num_steps}"], None, log)[0], log, wanted=0)
    row |= compare(args.folder / "left_alone", args.folder / "killed", num_steps)
    print(json.dumps(row))
    sys.exit(bool(row["different"]) or not row["same_metrics"] or row["left_in_cache"])


if __name__ == "__main__":
    main()
