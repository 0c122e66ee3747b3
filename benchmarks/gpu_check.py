"""First contact with a GPU: what only a GPU can say, in some 15 minutes. `make gpu-check` runs it.

    python benchmarks/gpu_check.py [--parts kernels decode ...] [--out r.json]     # one GPU
    python benchmarks/gpu_check.py --device cpu --smoke           # every line, tiny

Each part is a process of its own, so that a crash, a hang or a poisoned CUDA context costs this part only. Figures
are printed before failures; the exit code is 1 if a part failed, was cut or had no time left, or if a figure is one
that must not be.
docs/guides/gpu_check.md says what the figures should be and how to carry the program to a machine without network.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.expected import expected  # noqa: E402
from benchmarks.gpu.result import Result  # noqa: E402
from benchmarks.lib.bench_record import write_record  # noqa: E402
from megatron_tlt.workers.process import LAUNCHER  # noqa: E402

# Seconds that a part takes on a GPU whose caches of compiled kernels are empty: estimates, for the order and for tests.
# What tells most a second comes first. Parts behind the end of `--minutes` are cut, and keep the rows that they have.
PARTS = {
    "versions": 15,
    "kernels": 90,  # and compiles them for all others
    "decode": 70,
    "update": 60,
    "vllm_cycle": 90,
    "pairs": 220,
    "dspark": 60,
    "speculation": 130,
    "rl": 140,
    "exact": 200,
    "graphs": 50,
    "drafter": 40,
    "engines": 240,
    "ranks": 40,
}
RECIPE = ROOT / "configs/recipes/grpo-qwen2.5-0.5b-1n1g.yaml"
MINUTES = -(-sum(PARTS.values()) // 60)  # without vLLM's environment and a second GPU most of it is not needed
LARGEST_SHARE = 0.25  # of the time, for one part: one that hangs must leave time for the others
LAST_LINES = 6  # of a part that died, in the record
POLL_SECONDS = 0.2  # between two looks at what a part has found

Found = dict[str, Any]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: shows that every line runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="the one-GPU recipe, whose model is measured")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"time for all parts (default: {MINUTES})")
    parser.add_argument("--work", type=Path, help="folder for policies, runs and PART.log; by default a temporary one")
    parser.add_argument("--out", type=Path, help="the record, as JSON; written anew after each part")
    # Where a part's own process writes.
    parser.add_argument("--in-process", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run_part(args: argparse.Namespace, part: str, work: Path, seconds: float) -> Found:
    """One part in its own process. An error or the end of its time is a failure in what it returns."""
    out = work / f"{part}.json"
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--parts", part, "--device", args.device]
    command += ["--recipe", str(args.recipe.resolve()), "--work", str(work), "--in-process", str(out)]
    command += ["--smoke"] if args.smoke else []
    # srun's PMI descriptor is closed in a part, whose MPI would abort at the variables that name it.
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    env |= {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "TOKENIZERS_PARALLELISM": "false"}
    if args.device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}  # triton reads it at its import
    started = time.monotonic()
    print(f"\n{part}", flush=True)
    with (work / f"{part}.log").open("w+") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            found = follow(process, out, started + seconds)
        finally:
            if is_cut := process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # also what the part started
                process.wait()
        log.seek(0)
        # MPI's own line about the end comes behind the one that says why.
        lines = [line for line in log.read().splitlines() if line.strip() and not line.startswith("Abort(")]
        last = lines[-LAST_LINES:]
    if is_cut:
        found.fail(f"no end after {seconds:.0f} s")
    elif process.returncode:
        found.fail(f"ended with {process.returncode}: {last[-1] if last else 'no output'}")
    return as_found(part, found, time.monotonic() - started) | ({"log": last} if found.failures else {})


def follow(process: subprocess.Popen[bytes], out: Path, end: float) -> Result:
    """What a part writes to `out`, printed as it comes, until it ends or the time is over."""
    found, read = Result(), 0
    while True:
        is_over = process.poll() is not None or time.monotonic() >= end
        lines = out.read_text().splitlines(keepends=True) if out.is_file() else []
        for line in lines[read:]:
            if line.endswith("\n"):
                found.take(line)
                show(out.stem, json.loads(line))
                read += 1
        if is_over:
            return found
        time.sleep(POLL_SECONDS)


def as_found(part: str, found: Result, seconds: float) -> Found:
    """A part's result as the record has it."""
    figures = {"rows": found.rows, "summary": found.summary, "failures": found.failures}
    return {"part": part, "seconds": seconds, **figures}


def in_process(args: argparse.Namespace) -> None:
    """The part itself, in a process that `run_part` started."""
    import torch

    from benchmarks.gpu.check import Check

    if args.device == "cpu":
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        raise SystemExit("no CUDA device: --device cpu --smoke rehearses without one")
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    part = importlib.import_module(f"benchmarks.gpu.{args.parts[0]}")
    with args.in_process.open("w") as file:
        part.run(Check(device, args.smoke, args.recipe, args.work), Result(file))


def show(part: str, found: dict[str, Any]) -> None:
    """Prints a row, or figures with what they are expected to be. Failures are printed at the end."""
    if "row" in found:
        cells = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found["row"].items())
        print("    " + "  ".join(cells), flush=True)
    for name, value in found.get("summary", {}).items():
        shown = f"{value:14.4g}" if isinstance(value, float | int) else f"{value:>14s}"
        print(f"  {name:32s}{shown}{expected(part, name)}", flush=True)


def failures(every: list[Found]) -> list[str]:
    """What failed, a line each, with the part's name."""
    return [f"{found['part']}: {text}" for found in every for text in found["failures"]]


def run_all(args: argparse.Namespace, work: Path) -> list[Found]:
    """All parts in order. The record is written anew after each."""
    every: list[Found] = []
    end = time.monotonic() + 60 * args.minutes
    for part in args.parts:
        left = end - time.monotonic()
        if left <= 1:
            every.append(as_found(part, Result(failures=["no time was left"]), 0.0))
            continue
        every.append(run_part(args, part, work, max(1.0, min(left, 60 * args.minutes * LARGEST_SHARE))))
        print(f"  {'seconds':32s}{every[-1]['seconds']:14.0f}", flush=True)
        record(args, every)
    record(args, every)
    return every


def record(args: argparse.Namespace, every: list[Found]) -> None:
    """One JSON: rows and summary of all parts so far, and the failures."""
    rows = [{"part": found["part"], **row} for found in every for row in found["rows"]]
    rows += [{"part": found["part"], "failure": text} for found in every for text in found["failures"]]
    summary: dict[str, Any] = {f"{f['part']}/{k}": v for f in every for k, v in f["summary"].items()}
    summary |= {f"{found['part']}/seconds": found["seconds"] for found in every}
    summary["failures"] = len(failures(every))
    device = str(summary.get("versions/gpu", args.device)) + (", smoke" if args.smoke else "")
    write_record(args.out, rows, summary, device=device)


def main(argv: list[str] | None = None) -> int:
    """Runs, prints, writes; the exit code."""
    args = parse_arguments(argv)
    if args.in_process is not None:
        in_process(args)
        return 0
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        work = (args.work or Path(scratch)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        every = run_all(args, work)
    failed = failures(every)
    print(f"\n{len(args.parts)} parts in {time.monotonic() - started:.0f} s; {len(failed)} failures")
    for line in failed:
        print(f"FAILED  {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
