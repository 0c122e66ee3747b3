import random

import pytest

from megatron_tlt.errors import CoordinatorError
from megatron_tlt.idle.messages import (
    MAX_BYTES,
    MAX_PIECES,
    MAX_REPORTS,
    Kind,
    Message,
    Report,
    RequestRange,
    pack,
    unpack,
)
from megatron_tlt.idle.state import RankState


def a_report(rng: random.Random) -> Report:
    return Report(
        rng.randrange(2**32),
        rng.randrange(2**32),
        rng.randrange(2**40),
        rng.choice(list(RankState)),
        rng.randrange(2**32),
        rng.randrange(2**32),
        rng.random() * 1e6,
        rng.random(),
        1.7e9 + rng.random(),
        rng.randrange(-1, 2**31),
        rng.random() < 0.5,
    )


@pytest.mark.parametrize("count", [0, 1, MAX_REPORTS])
def test_reports_come_out_as_they_went_in(count):
    rng = random.Random(count)
    reports = [a_report(rng) for _ in range(count)]
    data = pack(Kind.REPORT, 511, 2**40, -0.25, reports)
    assert len(data) <= MAX_BYTES
    behind = bytearray(MAX_BYTES - len(data))  # receivers have one size of buffer
    assert unpack(data + behind) == Message(Kind.REPORT, 511, 2**40, -0.25, tuple(reports))


@pytest.mark.parametrize("count", [0, 1, MAX_PIECES])
@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.REPORT])
def test_other_messages_come_out_as_they_went_in(kind, count):
    rng = random.Random(count)
    pieces = [RequestRange(rng.randrange(2**62), rng.randrange(2**32), rng.randrange(2**32)) for _ in range(count)]
    data = pack(kind, 511, 2**40, -0.25, pieces=pieces)
    assert len(data) <= MAX_BYTES
    behind = bytearray(MAX_BYTES - len(data))
    assert unpack(data + behind) == Message(kind, 511, 2**40, -0.25, pieces=tuple(pieces))


def test_messages_are_small():
    assert len(pack(Kind.TAIL, 0, 1)) == 24
    assert len(pack(Kind.REPORT, 0, 1, reports=[a_report(random.Random(0))])) == 80
    assert MAX_BYTES < 2048


def test_bytes_that_are_no_message_are_refused():
    data = pack(Kind.OVER, 3, 1)
    data[0] = 99
    with pytest.raises(CoordinatorError, match="rank 3 sent no message of ours: kind 99"):
        unpack(data)
