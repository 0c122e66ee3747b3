"""vLLM's process: runs in vLLM's own environment, where the package of this file is on the path, without our torch.

    rank                                  this process
    VllmBackend --- Unix socket --- event loop --- one thread ---- LLMEngine and, in the same process, its worker
                    shared memory: weights ->, hidden states of answers <-

The engine is used by its thread only, one step or one operation at a time, so that requests are batched in the order in
which they came, and weights change between two steps. Messages are those of `trtllm/server.py`; here submit's requests
carry `key`, an answer may carry `hidden` (an entry of `entries.py` whose file the client removes), and

| from the client | answer |
|---|---|
| start(llm, hidden_bytes, max_requests, max_len, suffix, draft_len, directory) | reply |
| collect(on) | reply; whether answers carry hidden states from now on |
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_tlt.backends.entries import describe, tensor_bytes
from megatron_tlt.backends.receiving import PushReceiver
from megatron_tlt.backends.serving import dispatch, main
from megatron_tlt.backends.vllm.plugin import door
from megatron_tlt.backends.vllm.plugin.keyed import ARGUMENT

Message = dict[str, Any]


class Host:
    """One engine and the requests in it. `send` queues messages for the client; called in the event loop only."""

    def __init__(self, send: Callable[[Message], None]):
        self._send = send
        self._engine: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._push = PushReceiver(self._load)
        self._submitted: list[Message] = []  # not in the engine yet
        self._live: dict[str, tuple[int, str, int]] = {}  # external id -> number, internal id, prompt tokens
        self._lengths: dict[str, int] = {}  # output tokens so far, by external id
        self._stepping: asyncio.Task[None] | None = None
        self._collects = False
        self._directory = Path()
        self._files = 0

    @property
    def in_flight(self) -> int:
        """Requests without an answer."""
        return len(self._live) + len(self._submitted)

    @staticmethod
    def engine_version() -> str:
        """Version of the vLLM in this environment."""
        return door.version()

    def progress(self) -> Message:
        """Output tokens of the running requests so far."""
        return {"lengths": [n for n in list(self._lengths.values()) if n]}

    async def upkeep(self) -> None:
        """Nothing."""

    async def handle(self, message: Message) -> Message:
        """Executes one message and returns the reply's fields. Raises whatever the engine raises."""
        operations = {
            "start": self._start,
            "collect": self._collect,
            "abort": self._abort,
            "begin_update": self._begin_update,
            "weights": self._push.take_weights,
            "part": self._push.take_part,
            "finish_update": self._finish_update,
            "stats": self._stats,
        }
        return await dispatch(operations, message)

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def _rpc(self, method: str, *args: Any) -> Any:
        """The worker's result; there is one worker."""
        return (await self._in_thread(lambda: self._engine.collective_rpc(method, args=args)))[0]

    async def _start(self, message: Message) -> Message:
        self._directory = Path(message["directory"])
        self._engine = await self._in_thread(door.start_engine, message["llm"])
        names = ("hidden_bytes", "max_len", "max_requests", "suffix", "draft_len")
        await self._rpc("tlt_install", *(message[name] for name in names))
        return {}

    # -- requests ---------------------------------------------------------------------------------------------

    def submit(self, message: Message) -> None:
        """Queues the requests of one prompt; the answers are sent as they come."""
        for request in message["requests"]:
            self._submitted.append({**message, "request": request})
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        """Steps until nothing is in flight. A failure is the answer of every request."""
        try:
            self._push.check_closed()
            while self.in_flight:
                new, self._submitted = self._submitted, []
                for answer in await self._in_thread(self._step, new):
                    self._send(answer)
        except Exception as error:  # noqa: BLE001 - every failure is sent to the client under its requests
            traceback.print_exc()
            await self._fail(f"{type(error).__name__}: {error}")

    async def _fail(self, why: str) -> None:
        for number in await self._drop():
            self._send({"type": "answer", "id": number, "error": why})

    def _step(self, new: list[Message]) -> list[Message]:
        """One step of the engine, in its thread; returns the answers that ended with it."""
        for message in new:
            self._add(message)
        return [self._answer(output) for output in self._engine.step() if self._note(output)]

    def _add(self, message: Message) -> None:
        request, params = message["request"], message["params"]
        number = request["id"]
        extra = {ARGUMENT: [request["key"], *params["sampling"], request["prompt_id"]]}
        self._live[str(number)] = (number, "", len(message["token_ids"]))
        internal = self._engine.add_request(
            str(number), {"prompt_token_ids": message["token_ids"]}, door.sampling_params(params, extra)
        )
        self._live[str(number)] = (number, internal, len(message["token_ids"]))

    def _note(self, output: Any) -> bool:
        """Notes how long an output is; whether it has ended."""
        if output.request_id in self._live:
            self._lengths[output.request_id] = len(output.outputs[0].token_ids)
        return bool(output.finished) and output.request_id in self._live

    def _answer(self, output: Any) -> Message:
        number, internal, prompt = self._live.pop(output.request_id)
        del self._lengths[output.request_id]
        first = output.outputs[0]
        tokens = list(first.token_ids)
        hidden = self._hidden(internal, prompt + len(tokens) - 1)
        return {
            "type": "answer",
            "id": number,
            "token_ids": tokens,
            "finish_reason": first.finish_reason,
            **({} if hidden is None else {"hidden": hidden}),
        }

    def _hidden(self, internal: str, count: int) -> Message | None:
        """Writes the hidden states of an answer into a file for the client."""
        (states,) = self._engine.collective_rpc("tlt_end", args=(internal, count))
        if states is None or not self._collects:
            return None
        self._files += 1
        path = self._directory / f"hidden-{self._files}"
        path.write_bytes(tensor_bytes(states))
        return {**describe("hidden", states), "file": str(path), "offset": 0}

    async def _collect(self, message: Message) -> Message:
        self._collects = bool(message["on"])
        await self._rpc("tlt_collect", self._collects)
        return {}

    async def _abort(self, _: Message) -> Message:
        """What runs is answered with finish_reason "cancelled"."""
        for number in await self._drop():
            self._send({"type": "answer", "id": number, "token_ids": [], "finish_reason": "cancelled"})
        return {}

    async def _drop(self) -> list[int]:
        """Drops everything in flight behind the step under way; returns the numbers of those without an answer."""
        waiting, self._submitted = [message["request"]["id"] for message in self._submitted], []
        return waiting + await self._in_thread(self._drop_live)

    def _drop_live(self) -> list[int]:
        live, self._live, self._lengths = self._live, {}, {}
        internal = [name for _, name, _ in live.values() if name]
        if internal:
            self._engine.abort_request(internal, internal=True)
        for name in internal:
            self._engine.collective_rpc("tlt_end", args=(name, 0))
        return [number for number, _, _ in live.values()]

    # -- pushes and figures -----------------------------------------------------------------------------------

    async def _begin_update(self, message: Message) -> Message:
        self._push.begin(message, self.in_flight)
        await self._rpc("tlt_begin_update")
        return {}

    async def _load(self, entries: list[Message], verify: bool) -> dict[str, int]:
        sums: dict[str, int] = await self._rpc("tlt_update", entries, verify)
        return sums

    async def _finish_update(self, message: Message) -> Message:
        entries = self._push.drafter_of(message["version"])
        await self._rpc("tlt_finish_update")
        sums: dict[str, int] = {}
        if entries:
            sums = await self._rpc("tlt_update_drafter", entries, self._push.verify)
        await self._in_thread(self._engine.reset_prefix_cache)
        return self._push.close(sums)

    async def _stats(self, _: Message) -> Message:
        return dict(await self._rpc("tlt_counts"))

    def shutdown(self, limit_s: float | None = None) -> None:
        """Ends the engine; gives up after `limit_s` seconds."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        ending = threading.Thread(target=engine.engine_core.shutdown, daemon=True)
        ending.start()
        ending.join(limit_s)


if __name__ == "__main__":
    main(Host, sys.argv[1])
