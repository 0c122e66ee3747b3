"""The codec against byte vectors of the msgpack specification, and against bytes that are no message."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import pytest

from megatron_tlt.backends.wire import MAX_DEPTH, FrameReader, WireError, frame, message_of, pack, unpack

# Written down from the format table of the msgpack specification, not from our encoder.
VECTORS: list[tuple[Any, str]] = [
    (None, "c0"),
    (False, "c2"),
    (True, "c3"),
    (0, "00"),
    (127, "7f"),
    (128, "cc80"),
    (255, "ccff"),
    (256, "cd0100"),
    (65535, "cdffff"),
    (65536, "ce00010000"),
    (2**32 - 1, "ceffffffff"),
    (2**32, "cf0000000100000000"),
    (2**64 - 1, "cfffffffffffffffff"),
    (-1, "ff"),
    (-32, "e0"),
    (-33, "d0df"),
    (-128, "d080"),
    (-129, "d1ff7f"),
    (-32768, "d18000"),
    (-32769, "d2ffff7fff"),
    (-(2**31), "d280000000"),
    (-(2**31) - 1, "d3ffffffff7fffffff"),
    (-(2**63), "d38000000000000000"),
    (1.5, "cb3ff8000000000000"),
    (-0.0, "cb8000000000000000"),
    (math.inf, "cb7ff0000000000000"),
    ("", "a0"),
    ("é", "a2c3a9"),
    ("a" * 31, "bf" + "61" * 31),
    ("a" * 32, "d920" + "61" * 32),
    ("a" * 256, "da0100" + "61" * 256),
    ("a" * 65536, "db00010000" + "61" * 65536),
    (b"", "c400"),
    (b"\x00\xff", "c40200ff"),
    (b"a" * 256, "c50100" + "61" * 256),
    (b"a" * 65536, "c600010000" + "61" * 65536),
    ([], "90"),
    ([1, [True]], "920191c3"),
    ([0] * 16, "dc0010" + "00" * 16),
    ([0] * 65536, "dd00010000" + "00" * 65536),
    ({}, "80"),
    ({"a": 1, "b": None}, "82a16101a162c0"),
    (
        {f"{i:02}": 0 for i in range(16)},
        "de0010" + "".join(f"a2{f'{i:02}'.encode().hex()}00" for i in range(16)),
    ),
]


@pytest.mark.parametrize(("value", "data"), VECTORS, ids=lambda x: repr(x)[:24])
def test_vectors(value: Any, data: str) -> None:
    assert pack(value).hex() == data
    back = unpack(bytes.fromhex(data))
    assert back == value
    assert type(back) is type(value)


def test_long_forms_of_short_values_are_read() -> None:
    for data, value in (("cd0001", 1), ("d3ffffffffffffffff", -1), ("d90161", "a"), ("dc000100", [0])):
        assert unpack(bytes.fromhex(data)) == value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "missing"),
        ("c1", "no place"),  # never used
        ("ca3fc00000", "no place"),  # 32-bit float
        ("d40001", "no place"),  # extension
        ("c7010561", "no place"),
        ("a161c0", "after the value"),
        ("a2c3", "missing"),
        ("a1ff", "UTF-8"),
        ("8101c0", "no text"),
        ("82a161c0a161c0", "twice"),
        ("dfffffffff", "missing"),
        ("ddffffffff", "missing"),
        ("c6ffffffff61", "missing"),
        ("91" * (MAX_DEPTH + 2) + "00", "deeper"),
    ],
)
def test_what_is_no_value_of_ours(data: str, message: str) -> None:
    with pytest.raises(WireError, match=message):
        unpack(bytes.fromhex(data))


@pytest.mark.parametrize("value", [{1: 2}, object(), {1, 2}, 2**64, -(2**63) - 1, 1j, [[object()]]])
def test_what_cannot_be_sent(value: Any) -> None:
    with pytest.raises(WireError):
        pack(value)


def test_too_deep_is_not_sent() -> None:
    value: Any = 0
    for _ in range(MAX_DEPTH + 1):
        value = [value]
    with pytest.raises(WireError, match="deeper"):
        pack(value)


def test_random_bytes_are_a_value_or_an_error() -> None:
    rng = random.Random(0)
    kept = 0
    for _ in range(5000):
        data = rng.randbytes(rng.randrange(1, 12))
        try:
            value = unpack(data)
        except WireError:
            continue
        kept += 1
        assert repr(unpack(pack(value))) == repr(value)
    assert kept > 50


def test_frames_are_cut_out_of_any_pieces() -> None:
    messages = [{"type": "a", "n": i, "data": bytes(i)} for i in range(40)]
    stream = b"".join(frame(m) for m in messages)
    rng, reader, got, at = random.Random(1), FrameReader(), [], 0
    while at < len(stream):
        step = rng.randrange(1, 30)
        reader.feed(stream[at : at + step])
        at += step
        while (message := reader.next()) is not None:
            got.append(message)
    assert got == messages


def test_a_long_message_is_refused_on_both_sides_before_it_is_read() -> None:
    with pytest.raises(WireError, match="at most 10"):
        frame({"type": "a", "data": b"0123456789"}, limit=10)
    reader = FrameReader(limit=10)
    reader.feed(struct.pack(">I", 11))
    with pytest.raises(WireError, match="11 bytes was announced"):
        reader.next()


@pytest.mark.parametrize("value", [None, [], {}, {"type": 1}, {"kind": "a"}])
def test_a_message_is_a_map_with_a_type(value: Any) -> None:
    with pytest.raises(WireError, match="no map with a type"):
        message_of(pack(value))
