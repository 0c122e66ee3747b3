"""The weight push: actor shards, as full Hugging Face-named tensors, into the engine of every rank."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from megatron_tlt.errors import SyncError, shortened
from megatron_tlt.sync.buckets import checksum, fill_buckets

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.config.rollout import SyncSection
    from megatron_tlt.distributed.world import World
    from megatron_tlt.interfaces import RolloutBackend

MIB = 1 << 20


class BucketedSync:
    """Pushes through the ranks themselves: the policy's stream is collective, the engine is local.

    Every rank sees every full tensor, one bucket at a time, whatever the two parallel layouts are; the engine
    keeps its own shard. Peak extra memory is one bucket.
    """

    def __init__(self, section: SyncSection, backend: RolloutBackend, world: World):
        self._limit = section.bucket_mib * MIB
        self._verify = section.verify
        self._backend = backend
        self._world = world

    def push(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        drafter: tuple[Mapping[str, Tensor], int] | None = None,
    ) -> dict[str, float]:
        """Streams all tensors; the engine serves `version` afterwards, or refuses to serve at all. Collective.

        `drafter`: its tensors, which every rank holds already, and its version; the engine takes them in the same push.
        Raises SyncError when `sync.verify` finds a tensor that differs between policy, engine or ranks.
        """
        started = time.perf_counter()
        sums: dict[str, int] = {}
        counted = _Counted(weights, sums if self._verify else None)
        buckets = 0
        self._backend.begin_update(version)
        for bucket in fill_buckets(counted, version, self._limit):
            self._backend.update_weights(bucket)
            buckets += 1
        if drafter is not None:
            self._backend.update_drafter(*drafter)
        self._backend.finish_update()
        if self._verify:
            self._compare(sums)
        return {
            "sync/seconds": time.perf_counter() - started,
            "sync/mib": counted.num_bytes / MIB,
            "sync/buckets": float(buckets),
        }

    def _compare(self, sent: dict[str, int]) -> None:
        got = self._backend.weight_checksums()
        wrong = sorted(name for name in sent.keys() | got.keys() if sent.get(name) != got.get(name))
        if wrong:
            raise SyncError(
                f"rank {self._world.rank}: the engine holds other bytes than were pushed: {shortened(wrong)}"
            )
        # The stream itself crossed ranks (pipeline stages, tensor shards): all engines must hold one policy.
        for rank, other in enumerate(self._world.all_gather_object(got)):
            wrong = sorted(name for name in got.keys() | other.keys() if got.get(name) != other.get(name))
            if wrong:
                raise SyncError(
                    f"engines of ranks {self._world.rank} and {rank} hold different weights: {shortened(wrong)}"
                )


class _Counted:
    """Passes a stream of tensors on, counting bytes and, if asked, taking checksums on the sending side."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], sums: dict[str, int] | None):
        self._weights, self._sums, self.num_bytes = weights, sums, 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            self.num_bytes += tensor.numel() * tensor.element_size()
            if self._sums is not None:
                self._sums[name] = checksum(tensor)
            yield name, tensor
