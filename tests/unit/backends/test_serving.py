"""Messages over a socket: what is sent arrives, and bytes that are no message are refused."""

import pytest

from megatron_tlt.backends.serving import WireError, line_of, message_of

MESSAGE = {
    "type": "weights",
    "call": 2**53,
    "entries": [{"name": "é\n", "shape": [2, 3], "data": b"\x00\xff" * 7}, {"data": b"", "none": None}],
    "ratio": 0.1,
    "flags": [True, False, -1],
}


def test_a_message_is_one_line_and_arrives_equal() -> None:
    line = line_of(MESSAGE)
    assert line.index(b"\n") == len(line) - 1
    assert message_of(line) == MESSAGE


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"nonsense", b'{"type": 1}', b'{"type": "a", "b": {"$bytes": 3}}'], ids=repr
)
def test_a_line_that_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(WireError):
        message_of(line)


def test_a_torn_line_is_refused_wherever_it_is_cut() -> None:
    line = line_of(MESSAGE)
    for size in range(len(line) - 1):
        with pytest.raises(WireError):
            message_of(line[:size])
