"""Time from the last rank's end to the stop of all ranks: 2 to 64 ranks on this machine, and a model for 512.

Every rank but one trains in micro-steps that sleep, so that few cores can carry many ranks; the last one comes at a
random moment. Windows alternate between the coordinator as it is and one that does not send ALL_DONE, where only the
barrier ends the window. Figures are in milliseconds.

    python benchmarks/bench_stop_latency.py [--quick] [--ranks 2,4,8] [--step-ms 50] --out r.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from lib.bench_record import ROOT, write_record

sys.path.insert(0, str(ROOT))

POLL_S = 0.002
MODEL_RANKS = 512
SEND_US = 5.0  # of one small non-blocking send (mpich's shared memory: 2.4 to 4.9 on two idle cores)


def worker(step_s: float, windows: int) -> None:
    """One rank. Rank 0 prints [[with ALL_DONE or not, seconds from last-done to all out, ditto at the last], ...]."""
    from mpi4py import MPI

    from megatron_tlt.config.idle import IdleSection
    from megatron_tlt.idle.coordinator import IdleCoordinator
    from megatron_tlt.idle.policy import IdlePolicy
    from megatron_tlt.idle.window import IdleWindow

    class Silent(IdleCoordinator):
        announces = True

        def _announce(self, last_done_at: float) -> None:
            if self.announces:
                super()._announce(last_done_at)

    def step() -> dict[str, float]:
        time.sleep(step_s)
        return {"tokens": 1.0}

    world, rng, rows = MPI.COMM_WORLD, random.Random(11), []
    coordinator = Silent(world, IdleSection(poll_ms=1e3 * POLL_S))
    window = IdleWindow(coordinator, IdlePolicy(min_tail_seconds=0.0), poll_seconds=POLL_S)
    for i in range(2 * windows):
        last = rng.randrange(world.size)
        starts = [rng.random() * 2 * step_s for _ in range(world.size)]
        starts[last] = (4 + rng.random()) * step_s
        quiet(world.Ibarrier())
        Silent.announces = i % 2 == 0
        window.begin()
        until = time.perf_counter() + starts[world.rank]
        while (left := until - time.perf_counter()) > 0:
            coordinator.progress()
            time.sleep(min(left, POLL_S))
        report = window.run(step)
        mine = np.array([report.entered_at, report.left_at])
        everyone = np.empty((world.size, 2))
        quiet(world.Iallgather(mine, everyone))
        rows.append((Silent.announces, float(everyone[:, 1].max() - everyone[:, 0].max())))
    coordinator.close()
    if world.rank == 0:
        print("rows", json.dumps(rows), flush=True)


def quiet(request: Any) -> None:
    """Waits without using CPU time of other ranks."""
    while not request.Test():
        time.sleep(POLL_S)


def measure(ranks: int, step_s: float, windows: int) -> dict[bool, list[float]]:
    """Latencies in milliseconds, by whether ALL_DONE was sent."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launcher = [
        str(Path(sys.executable).parent / "mpiexec"),
        "-n",
        str(ranks),
        sys.executable,
        "-m",
        "mpi4py",
    ]
    command = [*launcher, __file__, "--worker", "--step-ms", str(1e3 * step_s), "--windows", str(windows)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True)
    line = next(x for x in done.stdout.splitlines() if x.startswith("rows "))
    found: dict[bool, list[float]] = {True: [], False: []}
    for announces, seconds in json.loads(line[5:]):
        found[announces].append(1e3 * seconds)
    return found


def fit(rows: list[dict[str, Any]], step_ms: float) -> tuple[float, float]:
    """(milliseconds a barrier round, milliseconds a rank) of what comes on top of the micro-step.

    The slowest of N - 1 training ranks has (N - 1) / N of a micro-step left in the mean. Neither term is negative.
    """
    ranks = np.array([r["ranks"] for r in rows], float)
    rest = np.array([r["mean_ms"] for r in rows]) - step_ms * (ranks - 1) / ranks
    terms = np.stack([np.log2(ranks), ranks], 1)
    weights = np.linalg.lstsq(terms, rest, rcond=None)[0]
    for i in range(2):
        if weights[i] < 0:
            weights = np.zeros(2)
            weights[1 - i] = max(0.0, float(terms[:, 1 - i] @ rest / (terms[:, 1 - i] @ terms[:, 1 - i])))
    return float(weights[0]), float(weights[1])


def one_row(ranks: int, announces: bool, times: list[float], step_ms: float) -> dict[str, Any]:
    return {
        "ranks": ranks,
        "announces": announces,
        "step_ms": step_ms,
        "windows": len(times),
        "min_ms": min(times),
        "median_ms": statistics.median(times),
        "mean_ms": statistics.mean(times),
        "p99_ms": float(np.quantile(times, 0.99)),
        "max_ms": max(times),
        "within_step_plus_20": sum(t <= step_ms + 20 for t in times) / len(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2, 4 and 8 ranks, 5 windows each")
    parser.add_argument("--ranks", default="2,3,4,8,16,32,64")
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--windows", type=int, default=30, help="of each kind, for each number of ranks")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.step_ms / 1e3, args.windows)
        return
    if args.quick:
        args.ranks, args.windows = "2,4,8", 5
    rows: list[dict[str, Any]] = []
    print(f"micro-steps of {args.step_ms:g} ms, {args.windows} windows of each kind; milliseconds")
    print(f"{'ranks':>6s} {'ended by':10s}{'median':>9s}{'p99':>9s}{'max':>9s}{'<= step + 20 ms':>17s}")
    for ranks in map(int, args.ranks.split(",")):
        for announces, times in measure(ranks, args.step_ms / 1e3, args.windows).items():
            row = one_row(ranks, announces, times, args.step_ms)
            rows.append(row)
            print(
                f"{ranks:6d} {'ALL_DONE' if announces else 'barrier':10s}{row['median_ms']:9.1f}{row['p99_ms']:9.1f}"
                f"{row['max_ms']:9.1f}{row['within_step_plus_20']:17.0%}",
                flush=True,
            )
    announced = [r for r in rows if r["announces"]]
    a_round, a_rank = fit(announced, args.step_ms)
    rounds = math.log2(MODEL_RANKS)
    here = args.step_ms + a_round * rounds + a_rank * MODEL_RANKS
    # With a core each, a round takes at most one look more, and each message of the last one what a send takes.
    apart = args.step_ms + max(a_round, 1e3 * POLL_S) * rounds + SEND_US / 1e3 * MODEL_RANKS
    print(f"fitted: micro-step * (N-1)/N + {a_round:.2f} ms * log2(N) + {a_rank:.3f} ms * N")
    print(f"model for {MODEL_RANKS} ranks: {here:.0f} ms if they shared these cores as the measured ones do,")
    print(
        f"  at most {apart:.0f} ms with a core each: {1e3 * POLL_S:g} ms a round, {SEND_US:g} us a send "
        f"instead of {1e3 * a_rank:.0f} us a rank"
    )
    summary: dict[str, Any] = {f"stop_ms_median_{r['ranks']}": r["median_ms"] for r in announced}
    summary |= {f"stop_ms_p99_{r['ranks']}": r["p99_ms"] for r in announced}
    summary |= {
        "round_ms": a_round,
        "rank_ms": a_rank,
        "model_512_shared_ms": here,
        "model_512_apart_ms": apart,
    }
    write_record(args.out, rows, summary)


if __name__ == "__main__":
    main()
