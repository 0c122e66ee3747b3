"""Weight sync: actor shards, as full Hugging Face-named tensors, into the engine of every rank."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from megatron_tlt.errors import SyncError, shortened
from megatron_tlt.sync.buckets import checksum, fill_buckets
from megatron_tlt.sync.fingerprint import WeightFingerprint

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.config.rollout import SyncSection
    from megatron_tlt.distributed.together import Ranks
    from megatron_tlt.interfaces import RolloutBackend

MIB = 1 << 20


class BucketedSync:
    """Sends weights through the ranks themselves: the policy's stream is collective, the engine is local.

    Every rank sees every full tensor, one bucket at a time, whatever the two parallel layouts are; the engine
    keeps its own shard. Peak extra memory is one bucket.
    """

    def __init__(self, section: SyncSection, backend: RolloutBackend, world: Ranks, hashes: bool = False):
        """`hashes`: `fingerprint` names the weights of the last push."""
        self._limit = section.bucket_mib * MIB
        self._verify = section.verify
        self._backend = backend
        self._world = world
        self._hash = WeightFingerprint(world) if hashes else None

    def push(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        drafter: tuple[Mapping[str, Tensor], int] | None = None,
    ) -> dict[str, float]:
        """Streams all tensors; the engine serves `version` afterwards, or refuses to serve at all. Collective.

        `drafter`: its tensors, which every rank has, and its version; the engine loads them in the same weight sync.
        Raises SyncError when `sync.verify` finds a tensor that differs between policy, engine or ranks.
        """
        started = time.perf_counter()
        sums: dict[str, int] = {}
        num_buckets = num_bytes = 0
        self._backend.begin_update(version)
        if self._hash is not None:
            weights = self._hash.watch(weights)
        for bucket in fill_buckets(weights, version, self._limit):
            num_buckets += 1
            num_bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in bucket.tensors)
            if self._verify:
                sums |= {name: checksum(tensor) for name, tensor in bucket.tensors}
            self._backend.update_weights(bucket)
        if drafter is not None:
            self._backend.update_drafter(*drafter)
        self._backend.finish_update()
        if self._verify:
            self._compare(sums)
        return {
            "sync/seconds": time.perf_counter() - started,
            "sync/mib": num_bytes / MIB,
            "sync/buckets": float(num_buckets),
        }

    def fingerprint(self) -> str:
        """A hash of all tensors of the last push but the drafter's, see `WeightFingerprint`; empty without `hashes`.
        Collective.
        """
        return "" if self._hash is None else self._hash.take()

    def _compare(self, sent: dict[str, int]) -> None:
        got = self._backend.weight_checksums()
        wrong = sorted(name for name in sent.keys() | got.keys() if sent.get(name) != got.get(name))
        if wrong:
            raise SyncError(f"rank {self._world.rank}: the engine holds other bytes than were sent: {shortened(wrong)}")
        # The stream itself crossed ranks (pipeline stages, tensor shards): all engines must hold one policy.
        for rank, other in enumerate(self._world.all_gather_object(got)):
            wrong = sorted(name for name in got.keys() | other.keys() if got.get(name) != other.get(name))
            if wrong:
                raise SyncError(
                    f"engines of ranks {self._world.rank} and {rank} hold different weights: {shortened(wrong)}"
                )
