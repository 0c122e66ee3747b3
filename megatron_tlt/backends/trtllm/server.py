"""The TensorRT-LLM engine's process: runs alone in TensorRT-LLM's own environment, where `backends/`
is the package `tlt_backends`.

    rank (megatron_tlt)                          this process (tensorrt_llm)
    trtllm.TrtllmBackend --- Unix socket --- TrtllmHost: requests, weight syncs, sleep --- Ray workers of the engine

It must not import megatron_tlt, whose torch is another one: only the standard library, tensorrt_llm and what
`backends/` shares with it, all of which run on Python 3.10. Messages are those of `serving.py` and release(tags),
resume(tags).
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable
from typing import Any

from ..serving import EngineHost, Message, main

CLASS = "$class"  # marks a map that is an instance of that class of `tensorrt_llm.llmapi`
_EXTENSION = "extension.TrtllmWorkerExtension"  # below the name that process.py gives this package here
_STATS_EVERY_S = 2.0
_STATS_WAIT_S = 0.2
_DRAFTING = ("numDraftTokens", "numAcceptedTokens", "numRequestsWithDraftTokens")


class TrtllmHost(EngineHost):
    """One engine and the requests in it."""

    def __init__(self, send: Callable[[Message], None]):
        super().__init__(send)
        self._sampling: Any = None
        self._live: dict[int, Any] = {}  # request id -> its output
        self._tasks: set[asyncio.Task[None]] = set()
        self._polling: asyncio.Task[None] | None = None
        self._totals = new_totals()
        self._iterations = 0  # that were counted, since the start
        self._stats_error: str | None = None
        self._stats_lock = asyncio.Lock()

    @property
    def in_flight(self) -> int:
        """Requests without a response, counted here: the engine's count may be stale."""
        return len(self._tasks)

    def progress(self) -> Message:
        """Steps, from an engine that has shown that it counts them."""
        return {"steps": self._iterations} if self._iterations and self._stats_error is None else {}

    @staticmethod
    def engine_version() -> str:
        """Version of the TensorRT-LLM in this environment."""
        import tensorrt_llm

        return str(tensorrt_llm.__version__)

    async def do_start(self, message: Message) -> Message:
        """Starts the engine."""
        from tensorrt_llm import AsyncLLM, llmapi

        extension = f"{__package__}.{_EXTENSION}"
        self._engine = AsyncLLM(**instantiate(message["llm"], llmapi), ray_worker_extension_cls=extension)
        await self._engine.setup_async()
        self._sampling = llmapi.SamplingParams
        self._polling = asyncio.ensure_future(self._poll_while_running())
        return {}

    def submit(self, message: Message) -> None:
        """Starts a request; its response is sent when it comes."""
        task = asyncio.ensure_future(self._response(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _response(self, message: Message) -> None:
        number = message["id"]
        try:
            sampling = self._sampling(**message["params"], seed=message["key"] >> 1)  # 63 bits
            output = self._engine.generate_async(inputs=message["token_ids"], sampling_params=sampling)
            self._live[number] = output
            first = (await output).outputs[0]
            response = {"token_ids": list(first.token_ids), "finish_reason": first.finish_reason}
        except Exception as error:  # noqa: BLE001 - every failure is sent to the client under its request
            traceback.print_exc()
            response = {"error": f"{type(error).__name__}: {error}"}
        self._live.pop(number, None)
        self._send({"type": "response", "id": number, **response})

    async def do_abort(self, _: Message) -> Message:
        """Aborts what runs; returns when all of it has been served."""
        await asyncio.sleep(0)  # requests that were submitted just before must have begun, or they would run on
        for output in list(self._live.values()):
            output.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return {}

    async def _rpc(self, method: str, *args: Any) -> Any:
        (result,) = await self._engine.collective_rpc(method, args=args)
        return result

    async def do_finish_update(self, _: Message) -> Message:
        """Finalises the layers and resets the prefix cache."""
        await self._engine.update_weights(None)
        return {}

    async def do_release(self, message: Message) -> Message:
        """Gives memory back."""
        await self._rpc("tlt_reset_prefix_cache")
        await self._engine.release(message["tags"])
        return {}

    async def do_resume(self, message: Message) -> Message:
        """Allocates it again."""
        await self._engine.resume(message["tags"])
        return {}

    async def do_stats(self, _: Message) -> Message:
        """Totals since the last call."""
        await self.poll_stats()
        totals, self._totals = self._totals, new_totals()
        return {"totals": totals, "error": self._stats_error}

    async def _poll_while_running(self) -> None:
        """The engine keeps the last 1,000 iterations only: takes their statistics in time."""
        while True:
            await asyncio.sleep(_STATS_EVERY_S)
            if self.in_flight:
                await self.poll_stats()

    async def poll_stats(self) -> None:
        """Adds the engine's iteration statistics since the last call to the totals; after an error never again."""
        if self._stats_error is not None:
            return
        async with self._stats_lock:
            try:
                records = await asyncio.to_thread(self._engine.get_stats, timeout=_STATS_WAIT_S)
            except Exception as error:  # noqa: BLE001 - statistics only: the reply carries the error
                self._stats_error = f"{type(error).__name__}: {error}"
                return
            for record in records:
                self._add(record)

    def _add(self, record: Message) -> None:
        self._iterations += 1
        self._totals["iterations"] += 1
        drafting = record.get("specDecodingStats")
        if drafting and drafting["numDraftTokens"] > 0:
            for name in _DRAFTING:
                self._totals[name] += drafting[name]

    @staticmethod
    def _end_of(engine: Any) -> Any:
        return engine.shutdown


def instantiate(value: Any, llmapi: Any) -> Any:
    """`value` with every map that is marked made an instance of its class in the module `llmapi`."""
    if not isinstance(value, dict):
        return value
    fields = {key: instantiate(item, llmapi) for key, item in value.items()}
    name = fields.pop(CLASS, None)
    return fields if name is None else getattr(llmapi, name)(**fields)


def new_totals() -> dict[str, int]:
    """Counters of iterations, all at zero."""
    return {"iterations": 0, **dict.fromkeys(_DRAFTING, 0)}


if __name__ == "__main__":
    main(TrtllmHost, *sys.argv[1:])
