"""The TensorRT-LLM engine's process: runs alone in TensorRT-LLM's own environment, where `backends/`
is the package `tlt_backends`.

    rank (megatron_tlt)                          this process (tensorrt_llm)
    trtllm.TrtllmBackend --- Unix socket --- Host: requests, pushes, sleep --- Ray workers of the engine

It must not import megatron_tlt, whose torch is another one: only the standard library, tensorrt_llm, `wire` and
`instances`, all of which run on Python 3.10. One client: when it disconnects, this process ends. Messages (maps with
"type"):

| from the client | answer |
|---|---|
| hello(protocol, heartbeat_s), after this side's hello(protocol, engine, pid) | none; if protocols differ, the end |
| start(llm) | reply, once the engine stands; this may take minutes, and only now are there no heartbeats |
| submit(requests, token_ids, params) | one answer(id, token_ids, finish_reason or error) a request, in any order |
| abort() | reply; what runs is answered with finish_reason "cancelled" |
| begin_update(version, verify), weights(entries, drafter), part(...), finish_update(version) | reply each |
| release(tags), resume(tags), stats(), shutdown() | reply |

Every request but submit has a `call`, repeated in its reply or in error(call, message).
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from ..wire import PROTOCOL, WireError, frame, frame_length, message_of
from .instances import CLASSES, instantiate

Message = dict[str, Any]
_EXTENSION = "extension.TltWorkerExtension"  # below the name that process.py gives this package here
_STATS_S = 2.0  # the engine keeps the last 1,000 iterations only
_STATS_WAIT_S = 0.2
_END_S = 20.0  # for the engine's shutdown after the client has gone
_DRAFTING = ("numDraftTokens", "numAcceptedTokens", "numRequestsWithDraftTokens")


class Host:
    """One engine and the requests in it. `send` queues messages for the client."""

    def __init__(self, send: Callable[[Message], None]):
        self._send = send
        self._llm: Any = None
        self._sampling: Any = None
        self._live: dict[int, Any] = {}  # request id -> its output
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: int | None = None  # version of the push under way
        self._verify = False
        self._part: tuple[Message, bytearray] | None = None  # a tensor that comes in parts
        self._drafter: list[Message] = []
        self._sums: dict[str, int] = {}
        self._totals = new_totals()
        self._last_iter: int | None = None
        self._stats_error: str | None = None
        self._stats_lock = asyncio.Lock()

    @property
    def in_flight(self) -> int:
        """Requests without an answer, counted here: the engine's count may be stale."""
        return len(self._tasks)

    @staticmethod
    def engine_version() -> str:
        """Version of the TensorRT-LLM in this environment."""
        import tensorrt_llm

        return str(tensorrt_llm.__version__)

    async def handle(self, message: Message) -> Message:
        """Executes one message and returns the reply's fields. Raises whatever the engine raises."""
        operations = {
            "start": self._start,
            "abort": self._abort,
            "begin_update": self._begin_update,
            "weights": self._weights,
            "part": self._take_part,
            "finish_update": self._finish_update,
            "release": self._release,
            "resume": self._resume,
            "stats": self._stats,
        }
        operation = operations.get(message["type"])
        if operation is None:
            raise ValueError(f"unknown message {message['type']!r}")
        return await operation(message)

    async def _start(self, message: Message) -> Message:
        from tensorrt_llm import AsyncLLM, llmapi

        classes = {name: getattr(llmapi, name) for name in CLASSES if hasattr(llmapi, name)}
        kwargs = instantiate(message["llm"], classes)
        extension = f"{__package__}.{_EXTENSION}"
        self._llm = AsyncLLM(**kwargs, ray_worker_extension_cls=extension)
        await self._llm.setup_async()
        self._sampling = llmapi.SamplingParams
        return {}

    def submit(self, message: Message) -> None:
        """Starts the requests of one prompt; the answers are sent as they come."""
        for request in message["requests"]:
            task = asyncio.ensure_future(self._answer(request, message["token_ids"], message["params"]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: Message, token_ids: list[int], params: Message) -> None:
        number = request["id"]
        try:
            if self._open is not None:
                raise RuntimeError(f"the push of version {self._open} has not finished")
            sampling = self._sampling(**params, seed=request["seed"])
            output = self._llm.generate_async(inputs=token_ids, sampling_params=sampling)
            self._live[number] = output
            first = (await output).outputs[0]
            answer = {"token_ids": list(first.token_ids), "finish_reason": first.finish_reason}
        except Exception as error:  # noqa: BLE001 - every failure is sent to the client under its request
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        self._live.pop(number, None)
        self._send({"type": "answer", "id": number, **answer})

    async def _abort(self, _: Message) -> Message:
        await asyncio.sleep(
            0
        )  # requests that were submitted just before must have begun, or they would run on
        for output in list(self._live.values()):
            output.abort()
        return {}

    async def _begin_update(self, message: Message) -> Message:
        if self.in_flight:
            raise RuntimeError(
                f"{self.in_flight} requests are in flight: weights change between rollouts only"
            )
        self._open, self._verify = message["version"], message["verify"]
        self._part, self._drafter, self._sums = None, [], {}
        return {}

    async def _weights(self, message: Message) -> Message:
        await self._take(message["version"], message["entries"], message["drafter"])
        return {}

    async def _take_part(self, message: Message) -> Message:
        """Bytes of one tensor, in order; the last ones complete it."""
        entry, data = self._part or (message["entry"], bytearray())
        if entry["name"] != message["entry"]["name"] or message["offset"] != len(data):
            raise ValueError(f"bytes of {message['entry']['name']} came at {message['offset']} out of order")
        data += message["data"]
        self._part = (entry, data)
        if len(data) >= message["total"]:
            self._part = None
            await self._take(message["version"], [{**entry, "data": bytes(data)}], message["drafter"])
        return {}

    async def _take(self, version: int, entries: Sequence[Message], drafter: bool) -> None:
        self._check_open(version)
        if drafter:  # kept until the end: it is loaded as a whole, after the policy whose embedding it shares
            self._drafter += entries
        else:
            self._sums |= agreed(
                await self._llm.collective_rpc("tlt_update", args=(list(entries), self._verify))
            )

    async def _finish_update(self, message: Message) -> Message:
        self._check_open(message["version"])
        drafter: dict[str, int] = {}
        await self._llm.update_weights(None)  # finalises the layers and resets the prefix cache
        if self._drafter:
            args = (self._drafter, self._verify)
            drafter = agreed(await self._llm.collective_rpc("tlt_update_drafter", args=args))
        self._open, self._drafter = None, []
        return {"checksums": self._sums, "drafter_checksums": drafter}

    def _check_open(self, version: int) -> None:
        if self._open != version:
            raise RuntimeError(f"tensors of version {version} came into the push of {self._open}")

    async def _release(self, message: Message) -> Message:
        await self._llm.collective_rpc("tlt_reset_prefix_cache")
        await self._llm.release(message["tags"])
        return {}

    async def _resume(self, message: Message) -> Message:
        await self._llm.resume(message["tags"])
        return {}

    async def _stats(self, _: Message) -> Message:
        await self.poll_stats()
        totals, self._totals = self._totals, new_totals()
        return {"totals": totals, "error": self._stats_error}

    async def poll_stats(self) -> None:
        """Adds the engine's iteration statistics since the last call to the totals; after an error never again."""
        if self._stats_error is not None:
            return
        async with self._stats_lock:
            try:
                records = await asyncio.to_thread(self._llm.get_stats, timeout=_STATS_WAIT_S)
            except Exception as error:  # noqa: BLE001 - statistics only: the reply carries the error
                self._stats_error = f"{type(error).__name__}: {error}"
                return
            for record in records:
                self._add(record)

    def _add(self, record: Message) -> None:
        number = record["iter"]
        if self._last_iter is not None and number > self._last_iter + 1:
            self._totals["missed"] += number - self._last_iter - 1
        self._last_iter = number
        self._totals["iterations"] += 1
        drafting = record.get("specDecodingStats")
        if drafting and drafting["numDraftTokens"] > 0:
            for name in _DRAFTING:
                self._totals[name] += drafting[name]

    def shutdown(self, limit_s: float | None = None) -> None:
        """Ends the engine; gives up after `limit_s` seconds."""
        if self._llm is None:
            return
        ending = threading.Thread(target=self._llm.shutdown, daemon=True)
        ending.start()
        ending.join(limit_s)
        self._llm = None


def agreed(replies: Sequence[dict[str, int]]) -> dict[str, int]:
    """The checksums that all workers of the engine found. Raises RuntimeError if they differ."""
    if any(reply != replies[0] for reply in replies):
        raise RuntimeError("the engine's workers received different bytes")
    return replies[0]


def new_totals() -> dict[str, int]:
    """Counters of iterations, all at zero."""
    return {"iterations": 0, "missed": 0, **dict.fromkeys(_DRAFTING, 0)}


class Connection:
    """The socket's end in this process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._host = Host(self.send)

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
            asyncio.ensure_future(self._poll_stats_regularly()),
        ]
        try:
            while (message := await self.receive())["type"] != "shutdown":
                if message["type"] == "submit":
                    self._host.submit(message)
                else:
                    self.send(await self._reply(message))
            self._host.shutdown()
            self.send({"type": "reply", "call": message["call"]})
            await self._writer.drain()
        finally:
            self._host.shutdown(_END_S)
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
                self.send({"type": "beat", "in_flight": self._host.in_flight})

    async def _poll_stats_regularly(self) -> None:
        while True:
            await asyncio.sleep(_STATS_S)
            if self._host.in_flight:
                await self._host.poll_stats()


def end_with_parent(grace_s: float) -> None:
    """Ends this process `grace_s` seconds after its parent, also while the event loop is busy."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(grace_s)
        os._exit(4)

    threading.Thread(target=watch, daemon=True).start()


async def _serve(path: str) -> None:
    connection = Connection(*await asyncio.open_unix_connection(path))
    await connection.serve()


def main(path: str) -> int:
    """Serves the client that listens at `path`; returns the exit code."""
    end_with_parent(_END_S + 5.0)
    Host.engine_version()  # imports the engine, which takes long, before the client waits at the socket
    code = 0
    try:
        asyncio.run(_serve(path))
    except EOFError:
        code = 2
    except WireError as error:
        print(f"broken protocol: {error}", file=sys.stderr)
        code = 3
    sys.stderr.flush()
    os._exit(code)  # threads and actors of the engine must not keep the process alive


if __name__ == "__main__":
    main(sys.argv[1])
