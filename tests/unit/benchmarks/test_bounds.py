"""The bounds of decoding, against parameter counts and sums done another way."""

from __future__ import annotations

import math

import pytest

from benchmarks.gpu.bounds import (
    Device,
    bound,
    matrix_elements,
    step_bytes,
    step_flops,
    train_flops,
)
from megatron_tlt.models.config import ModelConfig

# Qwen2.5-7B.
SEVEN = ModelConfig("qwen2", 152064, 3584, 28, 28, 4, 128, 18944, qkv_bias=True)
DEVICE = Device("d", 1e12, 100e12, "given")


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_are_all_parameters_but_the_embedding_norms_and_biases(tied):
    config = ModelConfig("qwen3", 1000, 64, 3, 8, 2, 16, 96, qk_norm=True, tie_word_embeddings=tied)
    shapes = config.parameter_shapes()
    wanted = sum(math.prod(s) for n, s in shapes.items() if len(s) == 2 and (tied or "embed" not in n))
    assert matrix_elements(config) == wanted


def test_one_sequence_is_bound_by_reading_the_weights():
    """7.07e9 elements in bf16 at 1 TB/s: 71 tokens a second, whatever the context within reason."""
    limit = bound(SEVEN, DEVICE, 1, 1000, 2)
    assert (
        limit.tokens_per_s
        == limit.by_bandwidth
        == pytest.approx(1e12 / (2 * 7.07e9 + 1000 * 57344), rel=1e-3)
    )
    assert limit.by_compute > 50 * limit.by_bandwidth


def test_many_sequences_are_bound_by_compute_until_their_caches_are_large():
    short, long = bound(SEVEN, DEVICE, 512, 100, 2), bound(SEVEN, DEVICE, 512, 8000, 2)
    assert short.tokens_per_s == short.by_compute < short.by_bandwidth
    assert long.tokens_per_s == long.by_bandwidth < long.by_compute
    assert short.by_compute == pytest.approx(100e12 / (2 * 7.07e9), rel=0.01)


def test_bytes_and_operations_of_a_step_grow_as_they_must():
    one, two = (step_bytes(SEVEN, b, 500, 2) for b in (1, 2))
    assert two - one == 500 * 57344 + 2 * 3584  # one more cache, one more row of the embedding
    assert step_bytes(SEVEN, 1, 501, 2) - one == 57344
    assert step_flops(SEVEN, 8, 500) == 8 * step_flops(SEVEN, 1, 500)
    # Attention of one cached token: a multiplication and an addition for q k and for p v, each head and layer.
    assert step_flops(SEVEN, 1, 501) - step_flops(SEVEN, 1, 500) == 4 * 28 * 28 * 128


def test_a_training_step_has_six_operations_an_element_and_token():
    short, long = (train_flops(SEVEN, 1, n) / n for n in (1, 8001))
    assert short == pytest.approx(6 * matrix_elements(SEVEN), rel=1e-3)
    # 4000 more positions on average: two products of a multiplication and an addition, forward and twice backward.
    assert long - short == 4000 * 3 * 4 * 28 * 28 * 128
