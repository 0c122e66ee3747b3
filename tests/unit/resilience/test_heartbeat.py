"""The memory between a rank and its watchdog."""

import random
import tempfile
from dataclasses import replace

import pytest

from megatron_tlt.resilience.heartbeat import SIZE, Block, Snapshot


@pytest.fixture
def file():
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        yield file


def test_what_is_written_is_read_through_another_mapping(file):
    writer, reader = Block(file.fileno()), Block(file.fileno())
    assert reader.read() == Snapshot()
    first = Snapshot(0, 5, 3, "rollout", "BUSY", 1.5, 2.5, 30.0, 7, 8, 9, 10.5)
    for i in range(5):
        writer.write(replace(first, order=i))
        assert reader.read() == replace(first, order=i, count=i + 1)


def test_a_write_that_was_cut_off_leaves_the_one_before(file):
    """As by a SIGKILL in the middle: any part of the newer slot may be old or new."""
    rng = random.Random(0)
    for cut in [0, 1, 7, 8, 50, 100, 130, *(rng.randrange(140) for _ in range(50))]:
        file.seek(0)
        file.write(bytes(SIZE))
        file.flush()
        block = Block(file.fileno())
        block.write(Snapshot(phase="push", order=1))
        block.write(Snapshot(phase="rollout", order=2))
        before = bytes(block._map[:])
        block.write(Snapshot(phase="exchange", order=3, longest=2**40))
        after = bytes(block._map[:])
        at = SIZE // 2  # the third write goes into the second slot
        assert before[:at] == after[:at]
        block._map[at + cut : SIZE] = before[at + cut : SIZE]
        assert block.read().phase in ("rollout", "exchange")
        assert block.read().phase == "rollout" or bytes(block._map[:]) == after


def test_long_names_are_cut(file):
    block = Block(file.fileno())
    block.write(Snapshot(phase="x" * 100, state="y" * 100))
    assert (block.read().phase, block.read().state) == ("x" * 32, "y" * 12)
