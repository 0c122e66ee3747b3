"""Versions and completeness of a weight sync, without an engine."""

import pytest
import torch

from megatron_tlt.errors import BackendError, SyncError
from megatron_tlt.sync.buckets import checksum
from megatron_tlt.sync.served_weights import NO_WEIGHTS, ServedWeights
from megatron_tlt.types import WeightBucket

SHAPES = {"a": (2,), "b": (3,)}


def test_a_push_is_served_when_it_is_complete():
    weights = ServedWeights(SHAPES, ["head"], keep_checksums=True)
    assert weights.version == NO_WEIGHTS
    with pytest.raises(BackendError, match="no weights yet"):
        weights.check_ready()
    weights.begin(4)
    tensors = weights.accept(WeightBucket(4, [("a", torch.ones(2)), ("head", torch.ones(9))]))
    assert [name for name, _ in tensors] == ["a"]
    weights.accept_drafter(7)
    with pytest.raises(BackendError, match=r"weight sync of version 4 has not finished \(1 tensors missing\)"):
        weights.check_ready()
    with pytest.raises(SyncError, match="version 4 lacks b"):
        weights.commit()
    weights.accept(WeightBucket(4, [("b", torch.ones(3))]))
    assert (weights.version, weights.drafter_version) == (NO_WEIGHTS, 0)
    weights.open_checksums |= {"a": 1, "b": 2}
    weights.commit()
    weights.check_ready()
    assert (weights.version, weights.drafter_version) == (4, 7)
    assert weights.checksums == {"a": 1, "b": 2, "head": checksum(torch.ones(9))}


def test_a_push_that_was_given_up_leaves_no_version():
    weights = ServedWeights({}, version=0)
    weights.begin(1)
    weights.accept_drafter(5)
    weights.begin(2)
    weights.commit()
    assert (weights.version, weights.drafter_version) == (2, 0)


def test_wrong_buckets_are_refused():
    weights = ServedWeights(SHAPES)
    with pytest.raises(SyncError, match="tensors of version 1 came while no weight sync is open"):
        weights.accept(WeightBucket(1, []))
    weights.begin(2)
    with pytest.raises(SyncError, match="version 1 came into the weight sync of 2"):
        weights.accept(WeightBucket(1, []))
    for name, tensor in (("a", torch.ones(3)), ("c", torch.ones(2))):
        with pytest.raises(SyncError, match=f"{name} of shape"):
            weights.accept(WeightBucket(2, [(name, tensor)]))
