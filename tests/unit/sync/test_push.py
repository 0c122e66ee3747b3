import pytest
import torch

from megatron_tlt.config.rollout import SyncSection
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.errors import SyncError
from megatron_tlt.sync.buckets import checksum
from megatron_tlt.sync.push import BucketedSync


class RecordingBackend:
    def __init__(self, corrupt=None, drop=None):
        self.calls, self.held, self.corrupt, self.drop = [], {}, corrupt, drop

    def begin_update(self, version):
        self.calls.append(("begin", version))

    def update_weights(self, bucket):
        self.calls.append(("bucket", len(bucket.tensors)))
        for name, tensor in bucket.tensors:
            if name != self.drop:
                self.held[name] = tensor + 1 if name == self.corrupt else tensor.clone()

    def update_drafter(self, weights, version):
        self.calls.append(("drafter", *weights, version))

    def finish_update(self):
        self.calls.append(("finish",))

    def weight_checksums(self):
        return {name: checksum(tensor) for name, tensor in self.held.items()}


WEIGHTS = {f"w{i}": torch.randn(1 << 17) for i in range(5)}  # half a MiB each


def test_push_is_begin_buckets_finish():
    backend = RecordingBackend()
    sync = BucketedSync(SyncSection(bucket_mib=1, verify=True), backend, SingleProcess())
    metrics = sync.push(WEIGHTS.items(), version=3)
    assert backend.calls == [("begin", 3), ("bucket", 2), ("bucket", 2), ("bucket", 1), ("finish",)]
    assert metrics["sync/mib"] == 2.5
    assert all(torch.equal(backend.held[name], tensor) for name, tensor in WEIGHTS.items())


def test_the_drafter_goes_before_the_push_is_closed():
    backend = RecordingBackend()
    BucketedSync(SyncSection(), backend, SingleProcess()).push(
        WEIGHTS.items(), version=3, drafter=({"fc.weight": torch.zeros(1)}, 5)
    )
    assert backend.calls[-2:] == [("drafter", "fc.weight", 5), ("finish",)]


@pytest.mark.parametrize("backend", [RecordingBackend(corrupt="w2"), RecordingBackend(drop="w2")])
def test_verify_names_the_tensor_that_differs(backend):
    sync = BucketedSync(SyncSection(verify=True), backend, SingleProcess())
    with pytest.raises(SyncError, match="w2"):
        sync.push(WEIGHTS.items(), version=1)


def test_verify_names_the_rank_that_holds_other_weights():
    class TwoRanks:
        rank = 0

        def all_gather_object(self, value):
            return [value, {**value, "w3": value["w3"] ^ 1}]

    sync = BucketedSync(SyncSection(verify=True), RecordingBackend(), TwoRanks())
    with pytest.raises(SyncError, match=r"ranks 0 and 1 hold different weights: w3$"):
        sync.push(WEIGHTS.items(), version=1)


def test_the_fingerprint_is_that_of_all_weights_of_the_last_push_and_of_no_drafter():
    sync = BucketedSync(SyncSection(bucket_mib=1), RecordingBackend(), SingleProcess(), hashes=True)
    names = []
    for weights, drafter in (
        (WEIGHTS, None),
        (WEIGHTS, ({"fc.weight": torch.zeros(1)}, 5)),
        ({**WEIGHTS, "w4": WEIGHTS["w4"] + 1}, None),
    ):
        sync.push(weights.items(), version=3, drafter=drafter)
        names.append(sync.fingerprint())
    assert names[0] == names[1] != names[2] and len(names[0]) == 64
    assert BucketedSync(SyncSection(), RecordingBackend(), SingleProcess()).fingerprint() == ""
