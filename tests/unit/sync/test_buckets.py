import torch

from megatron_tlt.sync.buckets import checksum, fill_buckets


def stream(sizes):
    for i, size in enumerate(sizes):
        yield f"t{i}", torch.full((size,), float(i))


def test_buckets_keep_order_and_limit():
    buckets = list(fill_buckets(stream([4, 4, 4, 100, 1]), version=7, limit_bytes=40))
    assert [[n for n, _ in b.tensors] for b in buckets] == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]
    assert {b.version for b in buckets} == {7}


def test_no_tensor_is_taken_before_its_bucket_is_wanted():
    taken = []

    def counting():
        for name, tensor in stream([10] * 6):
            taken.append(name)
            yield name, tensor

    buckets = fill_buckets(counting(), 0, limit_bytes=80)
    next(buckets)
    assert len(taken) == 3  # two fill the bucket, the third shows that it is full


def test_checksum_sees_one_flipped_bit_and_ignores_layout():
    a = torch.randn(8, 6)
    b = a.clone()
    assert checksum(a) == checksum(b) == checksum(a.t().contiguous().t())
    b.view(torch.int32)[3, 2] ^= 1
    assert checksum(a) != checksum(b)
    assert checksum(a.to(torch.bfloat16)) != checksum(a)
