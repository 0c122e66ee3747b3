import random

import pytest

from megatron_tlt.idle.messages import MAX_BYTES, MAX_RANGES, Kind, Message, Report, RequestRange, unpack
from megatron_tlt.idle.state import RankState


def padded(message: Message) -> bytearray:
    """The message in a receiver's buffer of MAX_BYTES."""
    data = message.pack()
    assert len(data) <= MAX_BYTES < 2048
    return data + bytearray(MAX_BYTES - len(data))


def test_reports_survive_packing():
    rng = random.Random(0)
    whole = [-1, *(rng.random() * 1e9 for _ in range(3))]
    report = Report(rng.randrange(2**32), rng.randrange(2**32), 2**40, RankState.TRAINING, True, *whole)
    message = Message(Kind.REPORT, 511, 2**40, -0.25, report=report)
    assert unpack(padded(message)) == message
    assert len(message.pack()) == 72


@pytest.mark.parametrize("count", [0, 1, MAX_RANGES])
def test_other_messages_survive_packing(count):
    rng = random.Random(count)
    ranges = [(rng.randrange(2**62), rng.randrange(2**32), rng.randrange(2**32)) for _ in range(count)]
    for kind in set(Kind) - {Kind.REPORT}:
        message = Message(kind, 511, 2**40, -0.25, tuple(RequestRange(*fields) for fields in ranges))
        assert unpack(padded(message)) == message
