"""Memory of the native decoder."""

from megatron_tlt.models.native.parts import Arena


def test_an_arena_is_zero_and_gives_pages_that_do_not_overlap():
    arena = Arena(3 * 4096)
    first, second = arena.take(5), arena.take(4096)
    assert not first.any() and not second.any()
    first.fill_(7)
    assert not second.any() and second.data_ptr() % 4096 == 0
    assert second.data_ptr() - first.data_ptr() == 4096
