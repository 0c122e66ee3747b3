"""Two GPUs as `rollout.tp: 2` uses them: an all-reduce captured in a graph, replayed, equal to the eager one.

Graphs are dropped before the process group is destroyed, as an engine's are: otherwise that would wait for ever. On one
GPU nothing is run; on CPU two processes do the same over gloo, without a graph.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.gpu.check import Check
from benchmarks.gpu.result import Result
from megatron_tlt.distributed.devices import set_nccl_environment
from megatron_tlt.distributed.tensor_parallel import GroupTensorParallel
from megatron_tlt.rollout.graph_capture import CudaCapturer, EagerCapturer, GraphCache
from megatron_tlt.trainer.device_memory import let_segments_grow

RANKS = 2
SECONDS = 120.0  # for both ranks; NCCL's first message takes some
_STORE = "ranks.store"  # in the check's folder
SHAPES = ((1, 3584), (64, 3584))  # rows of a decoding forward


def run(check: Check, found: Result) -> None:
    """Both ranks in processes of their own."""
    if check.is_cuda and torch.cuda.device_count() < RANKS:
        found.note({"skipped": f"{RANKS} GPUs are needed, {torch.cuda.device_count()} is visible"})
        return
    (check.work / _STORE).unlink(missing_ok=True)
    for failure in _run_both(check):
        found.fail(failure)
    if found.failures:
        return
    for rank in range(RANKS):
        for row in json.loads(_record(check.work, rank).read_text()):
            found.add_row(row)
    for row in found.rows:
        for what in ("graph_is_eager", "is_sum"):
            if not row[what]:
                found.fail(f"rank {row['rank']}, {row['rows']} rows: not {what}")
    for rows, _ in SHAPES:
        for name in ("graph_us", "eager_us"):
            found.note({f"{name}_{rows}": max(row[name] for row in found.rows if row["rows"] == rows)})


def _run_both(check: Check) -> list[str]:
    """What went wrong."""
    context = multiprocessing.get_context("spawn" if check.is_cuda else "fork")
    processes = [context.Process(target=one_rank, args=(rank, check)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    end, failures = time.monotonic() + SECONDS, []
    for rank, process in enumerate(processes):
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            failures.append(f"rank {rank}: no end after {SECONDS:.0f} s")
        elif process.exitcode:
            failures.append(f"rank {rank} ended with {process.exitcode}")
    return failures


def one_rank(rank: int, check: Check) -> None:
    """All shapes on this rank; writes its rows."""
    if check.is_cuda:
        check = replace(check, device=torch.device("cuda", rank))
        torch.cuda.set_device(check.device)
        let_segments_grow(check.device)
        set_nccl_environment()
    store = f"file://{(check.work / _STORE).resolve()}"
    backend = "cpu:gloo,cuda:nccl" if check.is_cuda else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=RANKS)
    assert dist.group.WORLD is not None
    tp = GroupTensorParallel(dist.group.WORLD)
    capturer = CudaCapturer(check.device) if check.is_cuda else EagerCapturer()
    cache = GraphCache(capturer, tp=tp)
    rows = [one_shape(check, tp, cache, shape) for shape in SHAPES]
    _record(check.work, rank).write_text(json.dumps(rows))
    cache.clear()
    dist.destroy_process_group()


def one_shape(
    check: Check, tp: GroupTensorParallel, cache: GraphCache, shape: tuple[int, int]
) -> dict[str, float | bool]:
    """Three replays on other numbers each, beside an eager all-reduce and the sum by hand; then the time of both."""
    given, summed = (torch.zeros(shape, dtype=check.dtype, device=check.device) for _ in range(2))

    def step() -> None:
        summed.copy_(given)
        tp.all_reduce(summed)

    cache.capture(shape, step)
    is_eager = is_sum = True
    for turn in range(3):
        generator = torch.Generator().manual_seed(turn)
        parts = torch.randint(-99, 99, (RANKS, *shape), generator=generator).to(check.dtype)  # sums are exact
        given.copy_(parts[tp.rank])
        cache.run(shape, step)
        got = summed.clone()
        step()
        is_eager &= torch.equal(got, summed)
        is_sum &= torch.equal(got.cpu(), parts.sum(0))
    times = {"graph_us": lambda: cache.run(shape, step), "eager_us": step}
    found = {name: 1e6 * statistics.median(check.seconds(call, 20)) for name, call in times.items()}
    return {"rank": tp.rank, "rows": shape[0], "graph_is_eager": is_eager, "is_sum": is_sum, **found}


def _record(work: Path, rank: int) -> Path:
    return work / f"ranks.{rank}.json"
