"""Ranks on unlike processors, and updates on processors without products of bf16, are said at the start."""

from types import SimpleNamespace

import pytest

from megatron_tlt.distributed.processors import engine_cpus, mixed_processors
from megatron_tlt.trainer import input_warnings
from megatron_tlt.trainer.preflight import check_report
from tests.helpers.checked_configs import make


def test_unlike_processors_are_named_with_their_ranks():
    assert mixed_processors(["x86_64 avx2"] * 4) is None
    kinds = ["x86_64 avx2", "x86_64 avx2 avx512f", "x86_64 avx2"]
    said = mixed_processors(kinds)
    assert said is not None and "x86_64 avx2: rank 0, 2; x86_64 avx2 avx512f: rank 1)" in said


def test_an_engine_has_the_cpus_of_its_ranks():
    bound = [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
    found = [engine_cpus(SimpleNamespace(rank=rank, all_gather_object=lambda _: bound), 2) for rank in range(4)]
    assert found == [{0, 1, 2, 3}] * 2 + [{4, 5, 6, 7}] * 2


@pytest.mark.parametrize(
    ("dtype", "device", "has_products", "is_said"),
    [("bf16", "cpu", False, True), ("bf16", "cpu", True, False), ("fp32", "cpu", False, False)],
)
def test_a_slow_update_is_said(dtype, device, has_products, is_said, monkeypatch):
    monkeypatch.setattr(input_warnings, "has_bf16_products", lambda: has_products)
    report = check_report(make(actor={"dtype": dtype}, distributed={"device": device}), 2)
    assert ("warning: actor.dtype = bf16" in report) == is_said
