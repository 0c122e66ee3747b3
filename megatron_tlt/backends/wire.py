"""Messages between a rank and its engine's process: JSON and raw bytes behind a length.

Both processes run this very file (`process.py` links it into the other environment), so only the standard
library is imported, and nothing that arrives is ever executed, which is why it is not pickle.

    frame    4 bytes: length of the payload, big-endian | payload
    payload  4 bytes: length of the JSON text | JSON text | the bytes values, one after the other

In the JSON text a bytes value is `{"$bytes": [its place behind the text, its length]}`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

PROTOCOL = 2  # changes with any message's name or meaning
MAX_MESSAGE = 64 << 20  # bytes of one payload
_LENGTH = struct.Struct(">I")
_BYTES = "$bytes"


class WireError(ValueError):
    """Bytes that are not a message, or a value that cannot be sent."""


def frame(message: Mapping[str, Any], limit: int = MAX_MESSAGE) -> bytes:
    """A message as it goes over the socket. Raises WireError, also if it is longer than `limit` bytes."""
    blobs = bytearray()

    def reference(value: object) -> dict[str, list[int]]:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise WireError(f"{type(value).__name__} cannot be sent")
        start = len(blobs)
        blobs.extend(value)
        return {_BYTES: [start, len(blobs) - start]}

    text = json.dumps(dict(message), default=reference).encode()
    length = _LENGTH.size + len(text) + len(blobs)
    if length > limit:
        raise WireError(f"a message of {length} bytes; at most {limit} are sent")
    return b"".join((_LENGTH.pack(length), _LENGTH.pack(len(text)), text, blobs))


def frame_length(header: bytes, limit: int = MAX_MESSAGE) -> int:
    """The payload's length from its 4 header bytes. Raises WireError if it is longer than `limit` bytes."""
    (length,) = _LENGTH.unpack(header)
    if length > limit:
        raise WireError(f"a message of {length} bytes was announced; at most {limit} are taken")
    return int(length)


def message_of(payload: bytes) -> dict[str, Any]:
    """The message in a frame's payload: a map with a text under "type". Raises WireError."""
    try:
        blobs_at = _LENGTH.size + _LENGTH.unpack_from(payload)[0]
        end = blobs_at

        def resolve(value: dict[str, Any]) -> Any:
            nonlocal end
            if value.keys() != {_BYTES}:
                return value
            start, size = value[_BYTES]
            end += size
            return payload[blobs_at + start : blobs_at + start + size]

        message = json.loads(payload[_LENGTH.size : blobs_at], object_hook=resolve)
    except (struct.error, ValueError, TypeError) as error:
        raise WireError(f"a payload that is no message: {error}") from error
    if end != len(payload):
        raise WireError(f"a payload of {len(payload)} bytes announces {end}")
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise WireError("a payload that is no map with a type")
    return message


class FrameReader:
    """Cuts a stream of bytes into messages; keeps an incomplete one until the rest is fed."""

    def __init__(self, limit: int = MAX_MESSAGE):
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Appends bytes of the stream."""
        self._buffer += data

    def next(self) -> dict[str, Any] | None:
        """The next whole message, or None until more is fed. Raises WireError."""
        if len(self._buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + frame_length(bytes(self._buffer[: _LENGTH.size]), self._limit)
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return message_of(payload)
