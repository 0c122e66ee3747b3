"""The receiving end of a weight push: which weights an engine serves, and how far the push under way is.

    begin(version) -> accept(bucket), mark_loaded(tensors) ... -> accept_drafter(version) -> commit()

All or nothing: between `begin` and `commit` the weights are torn and the engine must not generate, also after a push
that failed, until a later one is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_tlt.errors import BackendError, SyncError, shortened
from megatron_tlt.sync.buckets import checksum

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.types import WeightBucket

NO_WEIGHTS = -1  # policy version of an engine that no push has reached


class ServedWeights:
    """Versions of policy and drafter in one engine. Does not hold a tensor."""

    def __init__(
        self,
        parameter_shapes: Mapping[str, tuple[int, ...]],
        ignorable: Iterable[str] = (),
        keep_checksums: bool = False,
        version: int = NO_WEIGHTS,
    ):
        """`parameter_shapes` names every tensor of a push; `ignorable` ones may come and are not loaded."""
        self._shapes, self._ignorable = dict(parameter_shapes), frozenset(ignorable)
        self.keep_checksums = keep_checksums
        self.version, self.drafter_version = version, 0
        self.checksums: dict[str, int] = {}
        self._open: int | None = None
        self._missing: set[str] = set()
        self._next_drafter = 0
        self._sums: dict[str, int] = {}

    def check_ready(self) -> None:
        """Raises BackendError unless the engine has a complete set of weights."""
        if self._open is not None:
            raise BackendError(
                f"weights are torn: the push of version {self._open} has not finished "
                f"({len(self._missing)} tensors missing); the engine does not answer"
            )
        if self.version == NO_WEIGHTS:
            raise BackendError("the engine has no weights yet: push some first")

    def begin(self, version: int) -> None:
        """Opens a push of `version`; an open one is given up."""
        self._open, self._next_drafter = version, self.drafter_version
        self._missing, self._sums, self.checksums = set(self._shapes), {}, {}

    def require_open(self, what: str) -> int:
        """The version of the open push. Raises SyncError, naming `what` came, if none is open."""
        if self._open is None:
            raise SyncError(f"{what} came while no push is open")
        return self._open

    def accept(self, bucket: WeightBucket) -> list[tuple[str, Tensor]]:
        """The tensors of a bucket that the engine must load. Raises SyncError on a wrong version, name or shape."""
        version = self.require_open(f"tensors of version {bucket.version}")
        if bucket.version != version:
            raise SyncError(f"a bucket of version {bucket.version} came into the push of {version}")
        tensors = []
        for name, tensor in bucket.tensors:
            if name in self._ignorable:
                if self.keep_checksums:
                    self._sums[name] = checksum(tensor)
                continue
            wanted = self._shapes.get(name)
            if wanted is None or tuple(tensor.shape) != tuple(wanted):
                raise SyncError(f"{name} of shape {tuple(tensor.shape)} came, the engine expects {wanted}")
            tensors.append((name, tensor))
        return tensors

    def mark_loaded(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """The engine has loaded `tensors`."""
        self._missing.difference_update(name for name, _ in tensors)

    def accept_drafter(self, version: int) -> None:
        """The engine has loaded the drafter of `version` into the open push."""
        self._next_drafter = version

    def require_complete(self) -> int:
        """The version of the open push. Raises SyncError if none is open or a tensor has not come."""
        version = self.require_open("finish_update")
        if self._missing:
            raise SyncError(f"the push of version {version} lacks {shortened(sorted(self._missing))}")
        return version

    def commit(self, checksums: Mapping[str, int]) -> None:
        """Closes the push: its versions are served. `checksums` are those of the loaded tensors, if they are kept."""
        self.version, self._open = self.require_complete(), None
        self.drafter_version = self._next_drafter
        self.checksums = self._sums | dict(checksums)
