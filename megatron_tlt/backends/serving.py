"""The engine's process behind its socket: what every engine's server does alike.

Runs in the engine's environment, possibly under another package name, so only the standard library and `wire` are
imported.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from .wire import PROTOCOL, WireError, frame, frame_length, message_of

Message = dict[str, Any]
END_S = 20.0  # for the engine's shutdown after the client has gone
_UPKEEP_S = 2.0


class EngineHost(Protocol):
    """One engine and the requests in it."""

    @property
    def in_flight(self) -> int:
        """Requests without an answer."""

    @staticmethod
    def engine_version() -> str:
        """Version of the engine in this environment."""

    async def handle(self, message: Message) -> Message:
        """Executes one message and returns the reply's fields. Raises whatever the engine raises."""

    def submit(self, message: Message) -> None:
        """Starts the requests of one prompt; the answers are sent as they come."""

    def progress(self) -> Message:
        """What a heartbeat carries beside `in_flight`."""

    async def upkeep(self) -> None:
        """Called every other second while requests run."""

    def shutdown(self, limit_s: float | None = None) -> None:
        """Ends the engine; gives up after `limit_s` seconds."""


Operation = Callable[[Message], Awaitable[Message]]
HostClass = Callable[[Callable[[Message], None]], EngineHost]


async def dispatch(operations: Mapping[str, Operation], message: Message) -> Message:
    """Executes a message by its type. Raises ValueError for a type without an operation, and what operations raise."""
    operation = operations.get(message["type"])
    if operation is None:
        raise ValueError(f"unknown message {message['type']!r}")
    return await operation(message)


class Connection:
    """The socket's end in this process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: HostClass):
        self._reader, self._writer = reader, writer
        self._host = host(self.send)
        self._last_request = 0  # that was submitted

    def send(self, message: Message) -> None:
        """Queues a message on the socket; never waits."""
        self._writer.write(frame(message))

    async def receive(self) -> Message:
        """The next message. Raises EOFError when the client has gone, WireError for anything else."""
        try:
            header = await self._reader.readexactly(4)
            return message_of(await self._reader.readexactly(frame_length(header)))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError("the client has gone") from error

    async def serve(self) -> None:
        """Serves messages until the client sends shutdown or disconnects. Raises WireError."""
        engine = self._host.engine_version()
        self.send({"type": "hello", "protocol": PROTOCOL, "engine": engine, "pid": os.getpid()})
        hello = await self.receive()
        if hello["type"] != "hello" or hello.get("protocol") != PROTOCOL:
            raise WireError(f"the client has protocol {hello.get('protocol')!r}, this side has {PROTOCOL}")
        background = [
            asyncio.ensure_future(self._beat(float(hello["heartbeat_s"]))),
            asyncio.ensure_future(self._upkeep()),
        ]
        try:
            while (message := await self.receive())["type"] != "shutdown":
                if message["type"] == "submit":
                    self._last_request = message["requests"][-1]["id"]
                    self._host.submit(message)
                else:
                    self.send(await self._reply(message))
            self._host.shutdown()
            self.send({"type": "reply", "call": message["call"]})
            await self._writer.drain()
        finally:
            self._host.shutdown(END_S)
            for task in background:
                task.cancel()

    async def _reply(self, message: Message) -> Message:
        try:
            return {"type": "reply", "call": message["call"], **await self._host.handle(message)}
        except Exception as error:  # noqa: BLE001 - the client raises it as its own error
            traceback.print_exc()
            return {"type": "error", "call": message["call"], "message": f"{type(error).__name__}: {error}"}

    async def _beat(self, every: float) -> None:
        """Sends heartbeats from the event loop itself, so that they stop when it hangs."""
        while True:
            await asyncio.sleep(every)
            if (
                self._writer.transport.get_write_buffer_size() == 0
            ):  # the client does not read while it trains
                seen = {"in_flight": self._host.in_flight, "last_request": self._last_request}
                self.send({"type": "beat", **seen, **self._host.progress()})

    async def _upkeep(self) -> None:
        while True:
            await asyncio.sleep(_UPKEEP_S)
            if self._host.in_flight:
                await self._host.upkeep()


def end_with_parent(grace_s: float) -> None:
    """Ends this process `grace_s` seconds after its parent, also while the event loop is busy."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(grace_s)
        os._exit(4)

    threading.Thread(target=watch, daemon=True).start()


async def _serve(host: HostClass, path: str) -> None:
    connection = Connection(*await asyncio.open_unix_connection(path), host)
    await connection.serve()


def main(host: type[EngineHost], path: str) -> int:
    """Serves the client that listens at `path` with an engine of that class; returns the exit code."""
    end_with_parent(END_S + 5.0)
    host.engine_version()  # imports the engine, which takes long, before the client waits at the socket
    code = 0
    try:
        asyncio.run(_serve(host, path))
    except EOFError:
        code = 2
    except WireError as error:
        print(f"broken protocol: {error}", file=sys.stderr)
        code = 3
    sys.stderr.flush()
    os._exit(code)  # threads and actors of the engine must not keep the process alive
