"""Messages over a socket: what is sent arrives, and bytes that are no message are refused."""

import random
import struct

import pytest

from megatron_tlt.backends.wire import FrameReader, WireError, frame, message_of

MESSAGE = {
    "type": "weights",
    "call": 2**53,
    "entries": [{"name": "é", "shape": [2, 3], "data": b"\x00\xff" * 7}, {"data": b"", "none": None}],
    "ratio": 0.1,
    "flags": [True, False, -1],
}


def test_messages_arrive_whatever_the_pieces_of_the_stream() -> None:
    """Numbers, text, nested lists and maps, and bytes values, also empty ones, come back equal."""
    rng = random.Random(0)
    stream = b"".join(frame({**MESSAGE, "call": i}) for i in range(5))
    reader, arrived = FrameReader(), []
    while stream:
        size = rng.randrange(1, 40)
        reader.feed(stream[:size])
        stream = stream[size:]
        while (message := reader.next()) is not None:
            arrived.append(message)
    assert arrived == [{**MESSAGE, "call": i} for i in range(5)]


def with_length(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"nonsense",
        b'{"type": 1}',
        b'{"type": "a", "b": {"$bytes": 3}}',
        b'{"type": "a", "b": {"$bytes": [0, 9]}}',
    ],
    ids=repr,
)
def test_a_payload_that_is_no_message_is_refused(text: bytes) -> None:
    with pytest.raises(WireError):
        message_of(with_length(text))


def test_a_torn_payload_is_refused_wherever_it_is_cut() -> None:
    payload = frame(MESSAGE)[4:]
    for size in range(len(payload)):
        with pytest.raises(WireError):
            message_of(payload[:size])
    with pytest.raises(WireError):
        message_of(payload + b"x")


def test_limits_and_types() -> None:
    with pytest.raises(WireError, match="at most 10 are sent"):
        frame(MESSAGE, limit=10)
    reader = FrameReader(limit=10)
    reader.feed(frame(MESSAGE))
    with pytest.raises(WireError, match="was announced"):
        reader.next()
    with pytest.raises(WireError, match="set cannot be sent"):
        frame({"type": "a", "x": {1}})
