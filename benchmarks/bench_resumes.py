"""Kill a run with SIGKILL at random moments, again and again, resuming it each time; compare with a run left alone.

One process imports everything once and forks every attempt, so that an attempt spends its time in loading, steps and
saves and not in imports. An attempt is one rank with the whole program: lock, checkpoints in the background every two
steps, rollout bank, evaluation, metrics. It is killed after a random time, drawn so that the run gets to its end with
about the last kill; where it was is read from a page that it shares with its parent. The last attempt is not killed.

    python benchmarks/bench_resumes.py [--quick] [--resumes 200] [--seed 0] --out r.json
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
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench_record import ROOT, write_record

sys.path.insert(0, str(ROOT))

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

STEPS_PER_KILL = 0.5  # steps of the run for each kill: most attempts then get nowhere, some get far
# Not mpi4py: it starts MPI when it is imported, which every attempt must do for itself.
MODULES = (
    "megatron_tlt.cli",
    "megatron_tlt.build",
    "megatron_tlt.loop",
    "megatron_tlt.actor.policy",
    "transformers",
)


def attempt(config: Path, overrides: list[str], seconds: float | None, log: Path) -> tuple[int, str]:
    """Forks a run and kills it after `seconds` (None: never). Returns its exit status and the phase it was last in."""
    board = mmap.mmap(-1, 64)
    child = os.fork()
    if not child:
        run_forked(config, overrides, board, log)
    started = time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if seconds is not None and time.monotonic() - started >= seconds:
            os.kill(child, signal.SIGKILL)
            seconds = None
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(status), board[:64].rstrip(b"\0").decode()


def run_forked(config: Path, overrides: list[str], board: mmap.mmap, log: Path) -> None:
    """The child: one rank of `megatron-tlt train`; never returns."""
    from megatron_tlt.cli import main
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


def write_run(folder: Path, num_steps: int) -> Path:
    """The tiniest run there is that does everything."""
    from tests.helpers.runs import write_config

    return write_config(
        folder,
        train={"num_steps": num_steps, "prompts_per_step": 8, "run_dir": str(folder / "left_alone")},
        rollout={"samples_per_prompt": 4, "max_tokens": 16, "max_running_requests": 8},
        checkpoint={"every": 2, "keep": 2},
        eval={"every": 10, "num_prompts": 4, "samples_per_prompt": 1},
        rewards={"workers": 0, "functions": [{"name": "format", "pattern": ".*[aeiou].*", "threshold": 0.5}]},
        cluster={"ranks_per_node": 1},
    )


def steps_done(run_dir: Path) -> int:
    """Steps in the newest complete checkpoint."""
    with contextlib.suppress(FileNotFoundError):
        return int((run_dir / "checkpoints/latest").read_text().strip().removeprefix("step-"))
    return 0


def kill_and_resume(
    config: Path, run_dir: Path, kills: int, num_steps: int, rng: random.Random, log: Path
) -> Any:
    """`kills` killed attempts and one that is not; what became of them."""
    phases: Counter[str] = Counter()
    ended, longest, progressed = 0, 4.0, 0
    for number in range(kills):
        before = steps_done(run_dir)
        code, phase = attempt(config, [f"train.run_dir={run_dir}"], rng.uniform(0.0, longest), log)
        if code not in (0, -signal.SIGKILL):
            raise SystemExit(f"attempt {number} ended with {code}, see {log}:\n{log.read_text()[-3000:]}")
        phases["end" if code == 0 else phase or "start"] += 1
        ended += code == 0
        progressed += steps_done(run_dir) > before
        # A run that is ahead of its kills is killed earlier, one that is behind later.
        ahead = steps_done(run_dir) / num_steps > (number + 1) / kills
        longest = min(max(longest * (0.8 if ahead else 1.2), 0.5), 120.0)
        if sys.stderr.isatty() or number % 20 == 19:
            print(f"{number + 1} kills, step {steps_done(run_dir)}, up to {longest:.1f} s", file=sys.stderr)
    code, _ = attempt(config, [f"train.run_dir={run_dir}"], None, log)
    if code:
        raise SystemExit(f"the last attempt ended with {code}:\n{log.read_text()[-3000:]}")
    return {"phases": dict(phases.most_common()), "progressed": progressed, "ended_before_the_kill": ended}


def compare(left: Path, right: Path, num_steps: int) -> dict[str, Any]:
    """Weights, moments and the metrics that do not measure time, bit by bit."""
    import torch

    from tests.helpers.runs import checkpoint_tensors, rows

    last = f"checkpoints/step-{num_steps:06d}"
    a, b = checkpoint_tensors(left / last), checkpoint_tensors(right / last)
    different = sorted(
        name for name in a.keys() | b.keys() if name not in a or not torch.equal(a[name], b[name])
    )
    keep = ("step", "reward/mean", "length/mean", "policy/loss", "policy/grad_norm")
    metrics = [[{name: row.get(name) for name in keep} for row in rows(run)] for run in (left, right)]
    return {
        "tensors": len(a),
        "different": different,
        "same_metrics": metrics[0] == metrics[1] and len(metrics[0]) == num_steps,
        "banked": sum(row["rollout/banked"] for row in rows(right)),
        "left_in_bank": (right / "bank").exists(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="6 resumes")
    parser.add_argument("--resumes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs go (default: a temporary directory)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    kills = 6 if args.quick else args.resumes
    num_steps = max(8, int(STEPS_PER_KILL * kills))
    for module in MODULES:
        importlib.import_module(module)
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        config, log = write_run(folder, num_steps), folder / "log.txt"
        started = time.monotonic()
        code, _ = attempt(config, [], None, log)
        if code:
            raise SystemExit(f"the run left alone ended with {code}:\n{log.read_text()[-3000:]}")
        alone = time.monotonic() - started
        row = kill_and_resume(config, folder / "killed", kills, num_steps, random.Random(args.seed), log)
        row |= compare(folder / "left_alone", folder / "killed", num_steps)
        row |= {"resumes": kills, "num_steps": num_steps, "seconds_left_alone": round(alone, 1)}
        row["seconds"] = round(time.monotonic() - started - alone, 1)
    identical = int(not row["different"] and row["same_metrics"] and not row["left_in_bank"])
    print(json.dumps(row, indent=1))
    write_record(args.out, [row], {"identical": identical, "resumes": kills})
    sys.exit(not identical)


if __name__ == "__main__":
    main()
