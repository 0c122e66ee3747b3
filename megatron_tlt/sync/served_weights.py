"""The receiving end of a weight sync: the weights that an engine serves, and the tensors that an open sync has loaded.

    begin(version) -> accept(bucket) ... -> commit()

All or nothing: between `begin` and `commit` the weights are torn and the engine must not generate, also after a weight
sync that failed, until a later one is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from megatron_tlt.errors import BackendError, SyncError, shortened
from megatron_tlt.sync.buckets import checksum

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.models.hf.config import ModelConfig
    from megatron_tlt.types import WeightBucket

NO_WEIGHTS = -1  # policy version of an engine that no weight sync has reached


class ServedWeights:
    """Version of the policy in one engine. Does not hold a tensor."""

    def __init__(
        self,
        parameter_shapes: Mapping[str, tuple[int, ...]],
        ignorable: Iterable[str] = (),
        keep_checksums: bool = False,
        version: int = NO_WEIGHTS,
    ):
        """`parameter_shapes` names every tensor of a weight sync; `ignorable` ones may come and are not loaded."""
        self._shapes, self._ignorable = dict(parameter_shapes), frozenset(ignorable)
        self.keep_checksums = keep_checksums
        self.version = version
        self.checksums: dict[str, int] = {}
        self.open_checksums: dict[str, int] = {}
        """Of the open weight sync: the engine's owner adds those of the loaded tensors, if they are kept."""
        self._open: int | None = None
        self._missing: set[str] = set()

    @classmethod
    def of_policy(cls, policy: ModelConfig, keep_checksums: bool) -> ServedWeights:
        """A weight sync brings all of the policy's parameters; a tied head may come beside them."""
        ignorable = ("lm_head.weight",) if policy.tie_word_embeddings else ()
        return cls(policy.parameter_shapes(), ignorable, keep_checksums)

    def check_ready(self) -> None:
        """Raises BackendError unless the engine has a complete set of weights."""
        if self._open is not None:
            raise BackendError(
                f"weights are torn: the weight sync of version {self._open} has not finished "
                f"({len(self._missing)} tensors missing); the engine does not generate"
            )
        if self.version == NO_WEIGHTS:
            raise BackendError("the engine has no weights yet: a weight sync comes first")

    def begin(self, version: int) -> None:
        """Opens a weight sync of `version`; an open one is given up."""
        self._open = version
        self._missing = set(self._shapes)
        self.open_checksums = {}
        self.checksums = {}

    def require_open(self, what: str) -> int:
        """The version of the open weight sync. Raises SyncError, naming `what` came, if none is open."""
        if self._open is None:
            raise SyncError(f"{what} came while no weight sync is open")
        return self._open

    def accept(self, bucket: WeightBucket) -> list[tuple[str, Tensor]]:
        """The tensors of a bucket, for the engine to load now. Raises SyncError on a wrong version, name or shape."""
        version = self.require_open(f"tensors of version {bucket.version}")
        if bucket.version != version:
            raise SyncError(f"a bucket of version {bucket.version} came into the weight sync of {version}")
        tensors = []
        for name, tensor in bucket.tensors:
            if name in self._ignorable:
                if self.keep_checksums:
                    self.open_checksums[name] = checksum(tensor)
                continue
            wanted = self._shapes.get(name)
            if wanted is None or tuple(tensor.shape) != tuple(wanted):
                raise SyncError(f"{name} of shape {tuple(tensor.shape)} came, the engine expects {wanted}")
            tensors.append((name, tensor))
        self._missing.difference_update(name for name, _ in tensors)
        return tensors

    def require_complete(self) -> int:
        """The version of the open weight sync. Raises SyncError if none is open or a tensor has not come."""
        version = self.require_open("finish_update")
        if self._missing:
            raise SyncError(f"the weight sync of version {version} lacks {shortened(sorted(self._missing))}")
        return version

    def commit(self) -> None:
        """Closes the weight sync: its version is served. Raises SyncError as `require_complete`."""
        self.version, self._open = self.require_complete(), None
        self.checksums = self.open_checksums
