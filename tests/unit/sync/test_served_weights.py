"""Tensors that are not loaded, and unknown ones. What an engine serves of a push: integration/test_backends.py."""

import pytest
import torch

from megatron_tlt.errors import SyncError
from megatron_tlt.sync.buckets import checksum
from megatron_tlt.sync.served_weights import ServedWeights
from megatron_tlt.types import WeightBucket


def test_an_ignorable_tensor_is_not_loaded_and_an_unknown_one_is_refused():
    weights = ServedWeights({"a": (2,)}, ["head"], keep_checksums=True)
    with pytest.raises(SyncError, match="tensors of version 4 came while no weight sync is open"):
        weights.accept(WeightBucket(4, []))
    weights.begin(4)
    loaded = weights.accept(WeightBucket(4, [("a", torch.ones(2)), ("head", torch.ones(9))]))
    assert [name for name, _ in loaded] == ["a"]
    with pytest.raises(SyncError, match="c of shape"):
        weights.accept(WeightBucket(4, [("c", torch.ones(2))]))
    weights.commit()
    assert weights.checksums == {"head": checksum(torch.ones(9))}
