"""Memory of the native decoder."""

from megatron_tlt.models.native.parts import zeros


def test_memory_is_zero_and_begins_on_a_cache_line():
    for size in (5, 64, 1 << 20):
        made = zeros(size)
        assert made.shape == (size,) and not made.any() and made.data_ptr() % 64 == 0
