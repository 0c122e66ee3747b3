"""The rank's side of an engine in another process: its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_tlt.backends.base import BaseBackend
from megatron_tlt.backends.transport import by_cuda_ipc, in_shared_memory
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.errors import BackendError, SyncError, shortened
from megatron_tlt.models.decoders.base import DTYPES
from megatron_tlt.models.hf.config import EMBED, HEAD
from megatron_tlt.sync.buckets import checksum
from megatron_tlt.types import WeightBucket

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.backends.options import EngineOptions
    from megatron_tlt.backends.process import EngineProcess
    from megatron_tlt.sync.served_weights import ServedWeights


class RemoteWeights(BaseBackend):
    """The part of a `RolloutBackend` that sends weights to an engine's process, and ends it."""

    def __init__(self, process: EngineProcess, weights: ServedWeights, options: EngineOptions):
        """`process` has an engine that was started with `options`."""
        super().__init__(weights)
        self._process: EngineProcess | None = process
        self._options = options
        self._rollout = options.rollout
        self._tables: dict[str, Tensor] = {}
        self._next_drafter: tuple[Mapping[str, Tensor], int] | None = None  # of the open weight sync

    @property
    def process(self) -> EngineProcess:
        """The engine's process. Raises BackendError after `close`."""
        if self._process is None:
            raise BackendError("the rollout backend is closed")
        return self._process

    def begin_update(self, version: int) -> None:
        """Opens a weight sync of `version`; one that was open and never finished is given up."""
        self._weights.begin(version)
        self._next_drafter = None
        self.process.call("begin_update")

    def update_weights(self, bucket: WeightBucket) -> None:
        """Sends some tensors of the open weight sync. Raises BackendError, and SyncError on a wrong version, name or
        shape.
        """
        tensors = self._weights.accept(bucket)
        if tensors:
            self._weights.open_checksums |= self._send("weights", tensors)
        if self._options.keep_tables:
            for name, tensor in bucket.tensors:
                if name in (EMBED, HEAD):
                    if name not in self._tables:  # the copy stays: two at once would be of the tables' size
                        self._tables[name] = torch.empty_like(tensor, dtype=DTYPES[self._rollout.dtype])
                    self._tables[name].copy_(tensor.detach())

    def lookup_tables(self) -> tuple[Tensor, Tensor]:
        """Copies of embedding and LM head [V, H], made at the weight sync. Raises BackendError without
        `EngineOptions.keep_tables`.
        """
        if EMBED not in self._tables:
            raise BackendError("this engine was started for a run without drafter training: no tables were kept")
        return self._tables[EMBED], self._tables.get(HEAD, self._tables[EMBED])

    def update_drafter(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Takes the drafter's tensors into the open weight sync; `finish_update` sends them, behind the policy whose
        embedding the drafter shares. Raises SyncError.

        They are exactly those it was started with: a head or embedding beside them would overwrite the policy's.
        """
        self._weights.require_open(f"a drafter of version {version}")
        if self._options.drafter is None:
            raise SyncError(f"a drafter of version {version} came to an engine that has none")
        if wrong := weights.keys() ^ self._options.drafter.weights.keys():
            named = shortened(sorted(wrong))
            raise SyncError(f"the drafter of version {version} has not the tensors it was started with: {named}")
        self._next_drafter = weights, version

    def finish_update(self) -> None:
        """Closes the weight sync; the engine serves the new version. Raises SyncError if a tensor has not come."""
        drafter, self._next_drafter = self._next_drafter, None  # a copy that must not outlive the weight sync
        self._weights.require_complete()
        self.process.call("finish_update")
        if drafter is not None:
            assert self._options.drafter is not None  # or `update_drafter` had raised
            weights, version = drafter
            config = self._options.drafter.config
            tensors = list(KINDS[config.kind].engine_tensors(config, weights).items())
            sums = self._send("drafter", tensors)
            if self._weights.keep_checksums and sums != {name: checksum(tensor) for name, tensor in tensors}:
                raise SyncError(f"the engine holds other bytes of the drafter than version {version} has")
        self._weights.commit()

    def _send(self, kind: str, tensors: Sequence[tuple[str, Tensor]]) -> dict[str, int]:
        """Returns when the engine has loaded them; with `sync.verify` the checksums of the tensors as they arrived."""
        if self._options.sync.by_handles(torch.device(self._options.device).type):
            sending = by_cuda_ipc(tensors)
        else:
            sending = in_shared_memory(tensors, self.process.shared.path)
        with sending as location:
            reply = self.process.call(kind, tensors=location, verify=self._weights.keep_checksums)
        sums: dict[str, int] = reply["checksums"]
        return sums

    def close(self) -> None:
        """Ends the engine's process. A second call does nothing."""
        if self._process is not None:
            self._process.close()
        self._process = None
