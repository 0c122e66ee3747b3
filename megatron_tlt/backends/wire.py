"""Messages between a rank and its engine's process: a strict part of msgpack behind a length.

Both processes run this very file (`trtllm_process` shows it to the other environment), so only the standard library
is imported. A frame is the payload's length (4 bytes, big-endian) and the payload: one msgpack value made of nil,
booleans, integers of 64 bits, 64-bit floats, text, bytes, lists, and maps with text keys
(https://github.com/msgpack/msgpack/blob/master/spec.md). Anything else, also extension types and 32-bit floats, is an
error in both directions: nothing is guessed and nothing is executed, which is why it is not pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

PROTOCOL = 1  # changes with any message's name or meaning
MAX_MESSAGE = 64 << 20  # bytes of one payload
MAX_DEPTH = 16
_LENGTH = struct.Struct(">I")
# width in bytes -> struct code, smallest first
_UNSIGNED = {1: ">B", 2: ">H", 4: ">I", 8: ">Q"}
_SIGNED = {1: ">b", 2: ">h", 4: ">i", 8: ">q"}


class WireError(ValueError):
    """Bytes that are no message, or a value that cannot be one."""


def frame(message: Mapping[str, Any], limit: int = MAX_MESSAGE) -> bytes:
    """A message as it goes over the socket. Raises WireError if it is longer than `limit` bytes."""
    payload = pack(message)
    if len(payload) > limit:
        raise WireError(f"a message of {len(payload)} bytes; at most {limit} are sent")
    return _LENGTH.pack(len(payload)) + payload


def frame_length(header: bytes, limit: int = MAX_MESSAGE) -> int:
    """The payload's length from its 4 header bytes. Raises WireError if it is longer than `limit` bytes."""
    (length,) = _LENGTH.unpack(header)
    if length > limit:
        raise WireError(f"a message of {length} bytes was announced; at most {limit} are taken")
    return int(length)


def message_of(payload: bytes) -> dict[str, Any]:
    """The message in a frame's payload: a map with a text under "type". Raises WireError."""
    value = unpack(payload)
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise WireError("a payload that is no map with a type")
    return value


class FrameReader:
    """Cuts a stream of bytes into messages; holds the rest."""

    def __init__(self, limit: int = MAX_MESSAGE):
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Takes more bytes of the stream."""
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


def pack(value: Any) -> bytes:
    """msgpack bytes of a value, each number and length in its shortest form. Raises WireError."""
    out = bytearray()
    _pack(value, out, 0)
    return bytes(out)


def _pack(value: Any, out: bytearray, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise WireError(f"nested deeper than {MAX_DEPTH}")
    if value is None:
        out.append(0xC0)
    elif isinstance(value, bool):
        out.append(0xC3 if value else 0xC2)
    elif isinstance(value, int):
        _pack_int(value, out)
    elif isinstance(value, float):
        out += b"\xcb" + struct.pack(">d", value)
    elif isinstance(value, str):
        data = value.encode("utf-8")
        _pack_length(len(data), out, (0xA0, 32), {1: 0xD9, 2: 0xDA, 4: 0xDB})
        out += data
    elif isinstance(value, bytes | bytearray | memoryview):
        view = memoryview(value).cast("B")
        _pack_length(len(view), out, None, {1: 0xC4, 2: 0xC5, 4: 0xC6})
        out += view
    elif isinstance(value, list | tuple):
        _pack_length(len(value), out, (0x90, 16), {2: 0xDC, 4: 0xDD})
        for item in value:
            _pack(item, out, depth + 1)
    elif isinstance(value, Mapping):
        _pack_map(value, out, depth)
    else:
        raise WireError(f"{type(value).__name__} cannot be sent")


def _pack_map(value: Mapping[Any, Any], out: bytearray, depth: int) -> None:
    _pack_length(len(value), out, (0x80, 16), {2: 0xDE, 4: 0xDF})
    for key, item in value.items():
        if not isinstance(key, str):
            raise WireError(f"a map key that is no text: {key!r}")
        _pack(key, out, depth + 1)
        _pack(item, out, depth + 1)


def _pack_int(value: int, out: bytearray) -> None:
    if -32 <= value < 128:
        out.append(value & 0xFF)
        return
    codes, first = (_UNSIGNED, 0xCC) if value >= 0 else (_SIGNED, 0xD0)
    for offset, (width, code) in enumerate(codes.items()):
        low, high = (0, 1 << 8 * width) if value >= 0 else (-(1 << 8 * width - 1), 0)
        if low <= value < high:
            out.append(first + offset)
            out += struct.pack(code, value)
            return
    raise WireError(f"{value} does not fit 64 bits")


def _pack_length(length: int, out: bytearray, short: tuple[int, int] | None, tags: dict[int, int]) -> None:
    """The tag with the length: `short` is (first tag, lengths that fit into the tag itself)."""
    if short is not None and length < short[1]:
        out.append(short[0] + length)
        return
    for width, tag in tags.items():
        if length < 1 << 8 * width:
            out.append(tag)
            out += struct.pack(_UNSIGNED[width], length)
            return
    raise WireError(f"{length} items or bytes in one value")


def unpack(data: bytes) -> Any:
    """The one value that `data` is; not a byte may be left over. Raises WireError."""
    reader = _Reader(data)
    value = reader.value(0)
    if reader.at != len(data):
        raise WireError(f"{len(data) - reader.at} bytes after the value")
    return value


class _Reader:
    """Reads values from the front of some bytes."""

    def __init__(self, data: bytes):
        self._data, self.at = data, 0

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise WireError(f"nested deeper than {MAX_DEPTH}")
        tag = self._take(1)[0]
        if tag < 0x80:
            return tag
        if tag >= 0xE0:
            return tag - 0x100
        if tag < 0x90:
            return self._map(tag & 0x0F, depth)
        if tag < 0xA0:
            return self._list(tag & 0x0F, depth)
        if tag < 0xC0:
            return self._text(tag & 0x1F)
        return self._tagged(tag, depth)

    def _tagged(self, tag: int, depth: int) -> Any:
        if tag in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[tag]
        if tag == 0xCB:
            return struct.unpack(">d", self._take(8))[0]
        if 0xCC <= tag <= 0xCF:
            return self._number(_UNSIGNED, 1 << tag - 0xCC)
        if 0xD0 <= tag <= 0xD3:
            return self._number(_SIGNED, 1 << tag - 0xD0)
        if 0xC4 <= tag <= 0xC6:
            return bytes(self._take(self._number(_UNSIGNED, 1 << tag - 0xC4)))
        if 0xD9 <= tag <= 0xDB:
            return self._text(self._number(_UNSIGNED, 1 << tag - 0xD9))
        if tag in (0xDC, 0xDD):
            return self._list(self._number(_UNSIGNED, 2 << tag - 0xDC), depth)
        if tag in (0xDE, 0xDF):
            return self._map(self._number(_UNSIGNED, 2 << tag - 0xDE), depth)
        raise WireError(f"the tag 0x{tag:02x} has no place here")

    def _take(self, count: int) -> memoryview:
        end = self.at + count
        if end > len(self._data):
            raise WireError(f"{end - len(self._data)} bytes are missing")
        taken = memoryview(self._data)[self.at : end]
        self.at = end
        return taken

    def _number(self, codes: dict[int, str], width: int) -> int:
        return int(struct.unpack(codes[width], self._take(width))[0])

    def _text(self, length: int) -> str:
        try:
            return str(self._take(length), "utf-8")
        except UnicodeDecodeError as error:
            raise WireError(f"text that is not UTF-8: {error}") from error

    def _list(self, length: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(length)]

    def _map(self, length: int, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for _ in range(length):
            key = self.value(depth + 1)
            if not isinstance(key, str) or key in result:
                raise WireError(f"a map key that is no text or stands twice: {key!r}")
            result[key] = self.value(depth + 1)
        return result
