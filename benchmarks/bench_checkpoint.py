"""How long a checkpoint of the drafter blocks training.

    python benchmarks/bench_checkpoint.py [--quick] [--out r.json] [--directory DIR]

The drafter is that of a policy of hidden size 2048 (Qwen3-1.7B's shape), fp32 weights with AdamW's two moments; a
full checkpoint also has the policy's embedding and LM head (bf16), as one of an EAGLE module with its own tables has.
The variants take turns, medians are compared:

    full sync        all of it, written and synced before training goes on
    full async       all of it copied to memory, written by a thread
    selective async  only what is trained, copied to memory, written by a thread (what a run does)

`blocking` is the time before training may go on; `on disk` until the file is whole. Every checkpoint is finished
before the next begins; the first round is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lib.bench_record import ROOT, write_record

sys.path.insert(0, str(ROOT))

from megatron_tlt.drafter.state_file import drafter_state_writer
from megatron_tlt.drafter.training_state import TrainingState
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.config import EagleConfig
from megatron_tlt.models.eagle.model import EagleModel

POLICY = ModelConfig("qwen3", 151936, 2048, 28, 16, 8, 128, 6144, qk_norm=True)
QUICK = ModelConfig("qwen3", 16384, 512, 8, 8, 4, 64, 1536, qk_norm=True)


def states(config: ModelConfig) -> tuple[Callable[[], dict[str, Any]], Callable[[], dict[str, Any]]]:
    """(full, selective): functions that copy what they save; they share the trained part."""
    model = EagleModel(EagleConfig.of(config))
    model.initialise(0)
    trained = TrainingState(model)
    shape = (config.vocab_size, config.hidden_size)
    tables = {name: torch.randn(shape, dtype=torch.bfloat16) for name in ("embed", "head")}

    def selective() -> dict[str, Any]:
        return {"drafter": trained.named()}

    def full() -> dict[str, Any]:
        return selective() | {"tables": {name: table.clone() for name, table in tables.items()}}

    return full, selective


def size_of(state: Any) -> int:
    """Bytes of its tensors."""
    if isinstance(state, dict):
        return sum(map(size_of, state.values()))
    return state.nbytes if isinstance(state, torch.Tensor) else 0


def save(file: Path, state: Callable[[], dict[str, Any]], wait: bool) -> tuple[float, float]:
    """(blocking, on disk) seconds."""
    started = time.perf_counter()
    thread = threading.Thread(target=drafter_state_writer(state()), args=(file,))
    thread.start()
    if wait:
        thread.join()
    blocking = time.perf_counter() - started
    thread.join()
    return blocking, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller drafter, fewer rounds")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--directory", type=Path, help="where to write (default: the system's temporary directory)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    full, selective = states(QUICK if args.quick else POLICY)
    kinds = {"full sync": (full, True), "full async": (full, False), "selective async": (selective, False)}
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        for round_number in range(3 if args.quick else 4):
            for kind, (state, wait) in kinds.items():
                taken = save(Path(folder) / "drafter.safetensors", state, wait)
                if round_number:
                    times[kind].append(taken)
    rows, blocking = [], {}
    for kind, (state, _) in kinds.items():
        waited, done = zip(*times[kind], strict=True)
        blocking[kind] = statistics.median(waited)
        row = {"kind": kind, "bytes": size_of(state()), "blocking_s": blocking[kind], "min": min(waited)}
        rows.append(row | {"max": max(waited), "on_disk_s": statistics.median(done)})
        shown = f"{kind:16s} {row['bytes'] / 1e9:5.2f} GB  blocking {1e3 * blocking[kind]:8.1f} ms"
        print(
            f"{shown} ({1e3 * min(waited):.1f} - {1e3 * max(waited):.1f})  on disk {statistics.median(done):6.2f} s"
        )
    summary = {
        "blocking_full_vs_selective": blocking["full sync"] / blocking["selective async"],
        "blocking_async_full_vs_selective": blocking["full async"] / blocking["selective async"],
    }
    for key, value in summary.items():
        print(f"{key} {value:.2f}")
    write_record(args.out, rows, summary)


main()
