"""The engine's process behind its socket: the common part of the engines' servers.

Runs in the engine's environment, possibly under another package name, so only the standard library is imported. One
client: when it disconnects, this process ends. A message is a line of JSON, a map with a text under "type" (a bytes
value is `{"$bytes": its hexadecimal digits}`); nothing that arrives is ever executed, which is why it is not pickle.
`tensors`: see `entries.py`.

| from the client | response |
|---|---|
| start(llm, ...), after this side's hello(engine, device) | reply, once the engine stands; this may take minutes |
| submit(id, key, prompt_id, token_ids, start, params) | response(id, token_ids, finish_reason or error), in any order |
| abort() | reply, behind the responses of the running requests, with finish_reason "cancelled" |
| begin_update(), finish_update() | reply each, around a weight sync of the policy |
| weights(tensors, verify), drafter(tensors, verify) | reply(checksums); drafter brings all of its tensors at once |
| stats() and the other operations of the engine's `EngineHost` | reply, with fields of the engine's own |
| shutdown() | reply, and the end |

`start`: how many of `token_ids`, at their end, are response tokens of earlier turns.

Every request but submit has a `call`, repeated in its reply or in error(call, message). The client
checks versions of weight syncs and that all tensors have come, and submits nothing in between
(`sync/served_weights.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

Message = dict[str, Any]
END_S = 20.0  # for the engine's shutdown after the client has gone
_LONGEST = 1 << 30  # bytes of a message
_BYTES = "$bytes"


class WireError(ValueError):
    """Bytes that are not a message."""


def line_of(message: Mapping[str, Any]) -> bytes:
    """A message as it goes over the socket. Raises TypeError or AttributeError for a value that cannot be sent."""
    return json.dumps(message, default=lambda data: {_BYTES: data.hex()}).encode() + b"\n"


def message_of(line: bytes) -> dict[str, Any]:
    """The message in a line. Raises WireError."""
    try:
        message = json.loads(line, object_hook=_resolve)
    except (ValueError, TypeError) as error:
        raise WireError(f"a line that is no message: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise WireError("a line that is no map with a type")
    return message


def _resolve(value: dict[str, Any]) -> Any:
    return bytes.fromhex(value[_BYTES]) if value.keys() == {_BYTES} else value


class EngineHost(ABC):
    """One engine and the requests in it. A message of type X is executed by `do_X`, which returns the reply's fields
    and raises whatever the engine raises.
    """

    def __init__(self, send: Callable[[Message], None]):
        """`send` queues messages for the client."""
        self._send = send
        self._engine: Any = None
        self.last_request = 0  # that was submitted

    @staticmethod
    @abstractmethod
    def engine_version() -> str:
        """Version of the engine in this environment."""

    @staticmethod
    def device_type() -> str:
        """Type of device that the engine in this environment computes on."""
        return "cuda"

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Requests without a response."""

    @abstractmethod
    def submit(self, message: Message) -> None:
        """Starts a request; its response is sent when it comes."""

    def progress(self) -> Message:
        """Fields of a heartbeat beside `in_flight`. By `steps`, the engine's steps so far, the client sees that a step
        hangs; without it every heartbeat counts as progress.
        """
        return {}

    @abstractmethod
    async def _rpc(self, method: str, *args: Any) -> Any:
        """The result of a method of the engine's worker; there is one worker."""

    async def do_begin_update(self, _: Message) -> Message:
        """Opens a weight sync of the policy."""
        return {}

    async def do_weights(self, message: Message) -> Message:
        """Loads some tensors of the policy."""
        return {"checksums": await self._rpc("tlt_update", message["tensors"], message["verify"])}

    async def do_drafter(self, message: Message) -> Message:
        """Loads the drafter, behind the policy whose embedding it shares."""
        return {"checksums": await self._rpc("tlt_update_drafter", message["tensors"], message["verify"])}

    @staticmethod
    @abstractmethod
    def _end_of(engine: Any) -> Callable[[], Any]:
        """The function that ends the engine, or hangs."""

    def shutdown(self, limit_s: float | None = None) -> None:
        """Ends the engine; gives up after `limit_s` seconds."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        ending = threading.Thread(target=self._end_of(engine), daemon=True)
        ending.start()
        ending.join(limit_s)


def end_with_parent(grace_s: float) -> None:
    """Ends this process `grace_s` seconds after its parent, also while the event loop is busy."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(grace_s)
        os._exit(4)

    threading.Thread(target=watch, daemon=True).start()


async def _serve(host_class: type[EngineHost], path: str, heartbeat_s: float) -> None:
    """Serves messages until the client sends shutdown or disconnects. Raises EOFError, WireError."""
    reader, writer = await asyncio.open_unix_connection(path, limit=_LONGEST)

    def send(message: Message) -> None:
        writer.write(line_of(message))  # never waits

    host = host_class(send)
    send({"type": "hello", "engine": host.engine_version(), "device": host.device_type()})
    beat = asyncio.ensure_future(_beat(host, writer, heartbeat_s))
    try:
        while (message := await _receive(reader))["type"] != "shutdown":
            if message["type"] == "submit":
                host.last_request = message["id"]
                host.submit(message)
            else:
                send(await _reply(host, message))
        host.shutdown()
        send({"type": "reply", "call": message["call"]})
        await writer.drain()
    finally:
        host.shutdown(END_S)
        beat.cancel()


async def _receive(reader: asyncio.StreamReader) -> Message:
    """The next message. Raises EOFError when the client has gone, WireError for anything else."""
    try:
        line = await reader.readline()
    except ConnectionError as error:
        raise EOFError("the client has gone") from error
    if not line.endswith(b"\n"):
        raise EOFError("the client has gone")
    return message_of(line)


async def _reply(host: EngineHost, message: Message) -> Message:
    try:
        fields = await getattr(host, f"do_{message['type']}")(message)
        return {"type": "reply", "call": message["call"], **fields}
    except Exception as error:  # noqa: BLE001 - the client raises it as its own error
        traceback.print_exc()
        return {"type": "error", "call": message["call"], "message": f"{type(error).__name__}: {error}"}


async def _beat(host: EngineHost, writer: asyncio.StreamWriter, every: float) -> None:
    """Sends heartbeats from the event loop itself, so that they stop when it hangs."""
    while True:
        await asyncio.sleep(every)
        if writer.transport.get_write_buffer_size() == 0:  # the client does not read while it trains
            seen = {"in_flight": host.in_flight, "last_request": host.last_request}
            writer.write(line_of({"type": "beat", **seen, **host.progress()}))


def main(host: type[EngineHost], path: str, heartbeat_s: str) -> None:
    """Serves the client that listens at `path` with an engine of that class; ends the process."""
    end_with_parent(END_S + 5.0)
    host.engine_version()  # imports the engine, which takes long, before the client waits at the socket
    code = 0
    try:
        asyncio.run(_serve(host, path, float(heartbeat_s)))
    except EOFError:
        code = 2
    except WireError as error:
        print(f"broken protocol: {error}", file=sys.stderr)
        code = 3
    sys.stderr.flush()
    os._exit(code)  # threads and actors of the engine must not keep the process alive
