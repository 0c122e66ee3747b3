"""Writes a rank's shards of a megatron distributed checkpoint from a thread of this process.

megatron's own asynchronous writer starts a Manager process (which imports the main script again: 4-50 s),
forks workers (MPI does not survive a fork), and hangs for ever if a worker dies. On two CPU ranks that is
worse than the write itself. So the plan and the metadata are megatron's, the file is torch's, and only the copy before
and the thread are made here. The result is a plain torch_dist checkpoint.

Remove when megatron-core can write from a thread of the rank's own process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

import megatron_tlt.actor.compat  # noqa: F401  (before megatron)
from megatron_tlt.actor.checkpoint_files import FileRecord, record_of

# isort: split
# megatron comes after compat.
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
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
        super().__init__(str(path), per_thread_copy_ahead=0)  # nothing is left to copy from a device
        self.records: dict[str, FileRecord] = {}
        self.failure: str | None = "the writer thread died"
        """The error of the thread, once it has ended."""
        self.ended_at = 0.0
        """When it ended, by `time.monotonic`."""
        self._snapshot: _Snapshot | None = None
        self._results: list[WriteResult] = []
        self._thread: threading.Thread | None = None

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Copies what this rank writes to fresh CPU memory: training may go on when this returns."""
        self._snapshot = _Snapshot(plan, planner) if plan.items else None

    def start(self, files: Mapping[str, Callable[[Path], None]]) -> None:
        """Begins to write in the background: the shard, then `files`, each by calling its value with its path."""
        self._thread = threading.Thread(target=self._write, args=(files,), name="checkpoint-writer", daemon=True)
        self._thread.start()

    def _write(self, files: Mapping[str, Callable[[Path], None]]) -> None:
        directory = Path(self.checkpoint_dir)
        try:
            if self._snapshot is not None:
                self._results = FileSystemWriter.write_data(self, self._snapshot.taken, self._snapshot).wait()
            for name, write in files.items():
                write(directory / name)
            for name in {*files, *(result.storage_data.relative_path for result in self._results)}:
                self.records[name] = record_of(directory / name)
        except Exception as error:  # noqa: BLE001  every rank raises it when the save is published
            self.failure = _why(error)
        else:
            self.failure = None
        self._snapshot = None
        self.ended_at = time.monotonic()

    def is_done(self) -> bool:
        """Whether the thread has ended."""
        return self._thread is not None and not self._thread.is_alive()

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for the thread, at most so long."""
        assert self._thread is not None
        self._thread.join(timeout_s)

    def retrieve_write_results(self) -> list[WriteResult]:
        """This rank's entries of the metadata."""
        return self._results


class _Snapshot(DefaultSavePlanner):
    """Gives torch's writer copies of a plan's tensors."""

    def __init__(self, plan: SavePlan, planner: SavePlanner):
        super().__init__()
        self.taken = plan
        self._data = {item.index: _copied(planner.resolve_data(item)) for item in plan.items}

    def resolve_data(self, write_item: WriteItem) -> Any:
        """A tensor on the CPU, or the bytes of an object."""
        return self._data[write_item.index]


def _copied(data: Any) -> Any:
    return data.detach().to("cpu", copy=True).contiguous() if isinstance(data, Tensor) else data


def _why(error: BaseException) -> str:
    """The text of an error, or of the OSError that caused it (torch's archive writer reports a file position)."""
    first = error
    while (cause := first.__cause__ or first.__context__) is not None:
        first = cause
    first = first if isinstance(first, OSError) else error
    return f"{type(first).__name__}: {first}"


class ThreadSaveStrategy(TorchDistSaveShardedStrategy):
    """megatron's torch_dist strategy, writing through a `ThreadWriter`. One strategy object per save."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)
        self.writer: ThreadWriter | None = None
        self._planned: Any = None  # the metadata on the first rank, and the group that planned

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        """Plans with the other ranks and takes the snapshot. Collective. In place of the request: `write_metadata`."""
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        self.writer = ThreadWriter(Path(checkpoint_dir))
        (_, *self._planned), *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(state, False),
            self.writer,
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
        return AsyncRequest(None, (), [])

    def write_metadata(self) -> None:
        """Writes .metadata and metadata.json on the first rank, once every rank's writer is done. Collective, and
        unlike megatron's own functions for this not after a write, where one that fails leaves the other ranks waiting.
        """
        assert self.writer is not None, "see `async_save`"
        metadata, ranks = self._planned
        results = ranks.gather_object(self.writer.retrieve_write_results())
        if ranks.is_coordinator:
            self.writer.finish(metadata, results)
            save_config(CheckpointingConfig(self.backend, self.version), str(self.writer.checkpoint_dir))
