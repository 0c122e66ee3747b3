"""Writes a rank's shards of a megatron distributed checkpoint from a thread of this process.

megatron's own asynchronous writer starts a Manager process (which imports the main script again: 4-50 s),
forks workers (MPI does not survive a fork), and hangs for ever if a worker dies. On two CPU ranks that is
worse than the write itself. So the plan, the file format and the metadata are megatron's, and only the
writing is done here: a snapshot on the CPU, then one thread that writes and syncs one file. The result is a plain
torch_dist checkpoint.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

import megatron_tlt.actor.device  # noqa: F401  (before megatron)
from megatron_tlt.actor.checkpoint_files import FileRecord, record_of

# isort: split
# megatron comes after the device shim.
from megatron.core.dist_checkpointing.exchange_utils import (
    determine_main_replica_uniform_distribution,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)


class ThreadWriter(FileSystemWriterAsync):
    """megatron's writer with the staging copy made at once and no process started.

    Main thread: prepare_write_data (snapshot) -> start -> ... is_done -> retrieve_write_results.
    Writer thread: write the shard, then further files, sync them, compute their checksums.
    """

    def __init__(self, path: Path):
        super().__init__(str(path), thread_count=1)
        self.records: dict[str, FileRecord] = {}
        self._collected: list[Any] = []
        self._results: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: str | None = "the writer thread died"  # replaced when it ends

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Copies what this rank writes to fresh CPU memory: training may go on when this returns."""
        data: list[tuple[Any, Any]] = [(item, planner.resolve_data(item)) for item in plan.items]
        objects = [(item, value) for item, value in data if item.type == WriteItemType.BYTE_IO]
        tensors = [
            (item, value.detach().to("cpu", copy=True).contiguous())
            for item, value in data
            if item.type != WriteItemType.BYTE_IO
        ]
        name = f"{plan.storage_data.prefix}0.distcp"
        self.write_buckets = (
            [(os.path.join(self.checkpoint_dir, name), name, (objects, tensors))] if data else []
        )

    def start(self, files: Mapping[str, Callable[[Path], None]]) -> None:
        """Begins to write in the background: the shard, then `files`, each by calling its value with its path."""
        self._thread = threading.Thread(
            target=self._write, args=(files,), name="checkpoint-writer", daemon=True
        )
        self._thread.start()

    def _write(self, files: Mapping[str, Callable[[Path], None]]) -> None:
        self._write_shard()
        try:
            for name, write in files.items():
                path = Path(self.checkpoint_dir, name)
                write(path)
                self.records[name] = record_of(path)
        except OSError as error:
            self._failure = _why(error)
        else:
            self._failure = None

    def _write_shard(self) -> None:
        for path, name, content in self.write_buckets or []:
            pending: queue.Queue[int] = queue.Queue()  # megatron's worker takes one entry when it is done
            pending.put(0)
            self.write_preloaded_data(
                [self.transforms], 0, (path, name, content), self._results, pending, use_fsync=True
            )
            if os.path.exists(path):
                self.records[name] = record_of(Path(path))

    def is_done(self) -> bool:
        """Whether the thread has ended."""
        return self._thread is not None and not self._thread.is_alive()

    def join(self) -> None:
        """Waits for the thread."""
        assert self._thread is not None
        self._thread.join()

    def failure(self) -> str | None:
        """What went wrong in the thread, once it is done: keeps the results if nothing did."""
        for _ in self.write_buckets or []:
            if self._results.empty():
                return "the writer thread died"
            _, found = self._results.get()
            if isinstance(found, BaseException):
                return _why(found)
            self._collected.extend(found)
        self.write_buckets = []  # drops the snapshot
        return self._failure

    def retrieve_write_results(self) -> list[Any]:
        """What megatron's finalisation puts into the metadata."""
        return self._collected


def _why(error: BaseException) -> str:
    """The text of an error, or of the OSError that caused it (torch's archive writer reports a file position)."""
    first = error
    while (cause := first.__cause__ or first.__context__) is not None:
        first = cause
    first = first if isinstance(first, OSError) else error
    return f"{type(first).__name__}: {first}"


class ThreadSaveStrategy(TorchDistSaveShardedStrategy):
    """megatron's torch_dist strategy, writing through a `ThreadWriter`. One strategy object per save."""

    def __init__(self, replicas: dist.ProcessGroup) -> None:
        """`replicas`: the data-parallel group, which divides among itself what all of it hold."""
        super().__init__("torch_dist", 1)
        self.writer: ThreadWriter | None = None
        self._replicas = replicas

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        """Plans with the other ranks and takes the snapshot. Collective."""
        shares = determine_main_replica_uniform_distribution(sharded_state_dict, self._replicas)
        distribute_main_replicas_with_precomputed_distribution(sharded_state_dict, self._replicas, shares)
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        self.writer = ThreadWriter(Path(checkpoint_dir))
        planner = MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
        )
        planned, *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(state, False), self.writer, None, 0, planner=planner
        )
        return AsyncRequest(None, [], [lambda: save_state_dict_async_finalize(*planned)])
