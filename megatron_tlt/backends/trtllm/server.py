"""The TensorRT-LLM engine's process: runs alone in TensorRT-LLM's own environment, where `backends/`
is the package `tlt_backends`.

    rank (megatron_tlt)                          this process (tensorrt_llm)
    trtllm.TrtllmBackend --- Unix socket --- Host: requests, pushes, sleep --- Ray workers of the engine

It must not import megatron_tlt, whose torch is another one: only the standard library, tensorrt_llm, what `backends/`
shares with it and `instances`, all of which run on Python 3.10. One client: when it disconnects, this process ends.
Messages (maps with "type"):

| from the client | answer |
|---|---|
| hello(protocol, heartbeat_s), after this side's hello(protocol, engine, pid) | none; if protocols differ, the end |
| start(llm) | reply, once the engine stands; this may take minutes, and only now are there no heartbeats |
| submit(requests, token_ids, params) | one answer(id, token_ids, finish_reason or error) a request, in any order |
| abort() | reply, behind the answers of what ran, with finish_reason "cancelled" |
| begin_update(version, verify), weights(entries, drafter), finish_update(version) | reply each |
| release(tags), resume(tags), stats(), shutdown() | reply |

Every request but submit has a `call`, repeated in its reply or in error(call, message).
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from ..receiving import PushReceiver
from ..serving import dispatch, main
from .instances import CLASSES, instantiate

Message = dict[str, Any]
_EXTENSION = "extension.TltWorkerExtension"  # below the name that process.py gives this package here
_STATS_WAIT_S = 0.2
_DRAFTING = ("numDraftTokens", "numAcceptedTokens", "numRequestsWithDraftTokens")


class Host:
    """One engine and the requests in it. `send` queues messages for the client."""

    def __init__(self, send: Callable[[Message], None]):
        self._send = send
        self._llm: Any = None
        self._sampling: Any = None
        self._live: dict[int, Any] = {}  # request id -> its output
        self._tasks: set[asyncio.Task[None]] = set()
        self._push = PushReceiver(self._load)
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
            "weights": self._push.take_weights,
            "finish_update": self._finish_update,
            "release": self._release,
            "resume": self._resume,
            "stats": self._stats,
        }
        return await dispatch(operations, message)

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
            self._push.check_closed()
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
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return {}

    async def _begin_update(self, message: Message) -> Message:
        self._push.begin(message, self.in_flight)
        return {}

    async def _load(self, entries: list[Message], verify: bool) -> dict[str, int]:
        return agreed(await self._llm.collective_rpc("tlt_update", args=(entries, verify)))

    async def _finish_update(self, message: Message) -> Message:
        entries = self._push.drafter_of(message["version"])
        drafter: dict[str, int] = {}
        await self._llm.update_weights(None)  # finalises the layers and resets the prefix cache
        if entries:
            args = (entries, self._push.verify)
            drafter = agreed(await self._llm.collective_rpc("tlt_update_drafter", args=args))
        return self._push.close(drafter)

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

    def progress(self) -> Message:
        """Nothing: the engine does not report answers under way."""
        return {}

    async def upkeep(self) -> None:
        """The engine keeps the last 1,000 iterations only: takes their statistics in time."""
        await self.poll_stats()

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


if __name__ == "__main__":
    main(Host, sys.argv[1])
