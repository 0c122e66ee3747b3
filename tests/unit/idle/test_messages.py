import random

import pytest

from megatron_tlt.errors import CoordinatorError
from megatron_tlt.idle.messages import MAX_BYTES, MAX_REPORTS, Kind, Message, Report, pack, unpack
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
    )


@pytest.mark.parametrize("count", [0, 1, MAX_REPORTS])
@pytest.mark.parametrize("kind", list(Kind))
def test_a_message_comes_out_as_it_went_in(kind, count):
    rng = random.Random(count)
    reports = [a_report(rng) for _ in range(count)]
    data = pack(kind, 511, 2**40, -0.25, reports)
    assert len(data) <= MAX_BYTES
    behind = bytearray(MAX_BYTES - len(data))  # receivers have one size of buffer
    assert unpack(data + behind) == Message(kind, 511, 2**40, -0.25, tuple(reports))


def test_messages_are_small():
    assert len(pack(Kind.TAIL, 0, 1)) == 24
    assert len(pack(Kind.REPORT, 0, 1, reports=[a_report(random.Random(0))])) == 76
    assert MAX_BYTES < 2048


def test_bytes_that_are_no_message_are_refused():
    data = pack(Kind.OVER, 3, 1)
    data[0] = 99
    with pytest.raises(CoordinatorError, match="rank 3 sent no message of ours: kind 99"):
        unpack(data)
