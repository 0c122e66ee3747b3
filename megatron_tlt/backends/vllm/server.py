"""vLLM's process: runs in vLLM's own environment, where the package of this file is on the path, without our torch.

    rank                                  this process
    VllmBackend --- Unix socket --- event loop --- one thread ---- LLMEngine and, in the same process, its worker
                    shared memory: weights ->, hidden states of responses <-

The engine is used by its thread only, which steps until an operation waits for it, so that requests are batched in the
order in which they came, and weights change between two steps. With `rollout.tp` above 1 each rank of an engine has
such a process, with a scheduler of its own, and the first one orders the others' steps: how many requests to admit,
when to pause for an operation.

Messages are those of `serving.py`; here a response may carry `kept` (a safetensors file, which the client removes, of
`hidden` states and `routed_experts`) and `text` (up to the stop string that ended it), a heartbeat may be `in_step`:
sent between the same two steps by all ranks of an engine, a submit may carry `pre_rolled` (the response that an earlier
policy drew with the same key: it drafts), the responses to an abort the tokens drawn so far, and

| from the client | response |
|---|---|
| start(llm, hidden_bytes, max_requests, max_len, speculation, routed_experts, | reply |
| verify_rows, directory, tokenizer, stop, beat_s) | |
| sleep_cache(), sleep_weights(), wake(tags) | reply, once memory is given back or there again |
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_tlt.backends.serving import EngineHost, Message, main
from megatron_tlt.backends.transport import write_shared
from megatron_tlt.backends.vllm.plugin import adapter, compat
from megatron_tlt.backends.vllm.plugin.hidden import HIDDEN
from megatron_tlt.backends.vllm.plugin.keyed import ARGUMENT, PRE_ROLLED
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.rollout.stops import StopStringFinder


@dataclass(slots=True)
class _Live:
    """A request in the engine."""

    number: int  # the client's
    internal: str  # vLLM's name
    prompt_tokens: int  # with `start`
    start: int  # response tokens of earlier turns, the end of its prompt
    stops: StopStringFinder | None
    drawn: list[int] = field(default_factory=list)  # so far

    def read(self, token_ids: Sequence[int]) -> bool:
        """Notes the response so far; whether a stop string has ended it. Mutates."""
        for token in token_ids[len(self.drawn) :]:
            self.drawn.append(token)
            if self.stops is not None and self.stops.push(token):
                return True
        return False


@dataclass(frozen=True, slots=True)
class _Order:
    """What the first rank of an engine has all of its ranks do before a step."""

    awaits: int  # operations of this run of steps, done and waiting, before it goes on; 0: it steps
    admits: int  # requests, in the order of their submission
    beats: bool


class VllmHost(EngineHost):
    """One engine and the requests in it; called in the event loop only."""

    def __init__(self, send: Callable[[Message], None]):
        super().__init__(send)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._submitted: deque[Message] = deque()  # not in the engine yet
        self._waiting = 0  # operations that wait for the engine's thread
        self._live: dict[str, _Live] = {}  # by external id
        self._stepping: asyncio.Task[None] | None = None
        self._arrived = threading.Semaphore(0)  # requests submitted and not in the engine
        self._operations = 0  # done since the steps under way began
        self._steps = 0  # of the engine
        self._operated = asyncio.Event()
        self._beat_s, self._beaten = math.inf, 0.0  # between heartbeats in step; when the last one was sent
        self._directory = self._tokenizer_at = Path()
        self._tokenizer: HFTokenizer | None = None  # read for the first stop string

    @property
    def in_flight(self) -> int:
        """Requests without a response."""
        return len(self._live) + len(self._submitted)

    @staticmethod
    def engine_version() -> str:
        """Version of the vLLM in this environment."""
        return adapter.version()

    @staticmethod
    def device_type() -> str:
        """That of vLLM's build in this environment."""
        return adapter.device_type()

    def progress(self) -> Message:
        """Steps, and response tokens of the running requests so far, those of earlier turns included."""
        lengths = [live.start + len(live.drawn) for live in list(self._live.values()) if live.drawn]
        return {"steps": self._steps, "lengths": lengths}

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of an operation between two steps."""
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        finally:
            self._waiting -= 1
            self._operations += 1
            self._operated.set()

    async def _rpc(self, method: str, *args: Any) -> Any:
        return (await self._in_thread(lambda: self._engine.collective_rpc(method, args=args)))[0]

    async def do_start(self, message: Message) -> Message:
        """Starts the engine with our extension."""
        self._directory, self._tokenizer_at = Path(message["directory"]), Path(message["tokenizer"])
        self._stop_finder(message["stop"])  # a tokenizer that cannot be read ends the start, not a response
        records_routers = message["routed_experts"] is not None
        self._engine = await self._in_thread(adapter.start_engine, message["llm"], records_routers)
        if message["llm"].get("tensor_parallel_size", 1) > 1:
            self._beat_s = message["beat_s"]
        names = ("hidden_bytes", "max_len", "max_requests", "speculation", "routed_experts", "verify_rows")
        await self._rpc("tlt_install", *(message[name] for name in names))
        return {}

    # -- requests ---------------------------------------------------------------------------------------------

    def submit(self, message: Message) -> None:
        """Queues a request; its response is sent when it comes."""
        self._submitted.append(message)
        self._arrived.release()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        """Steps until nothing is in flight. A failure ends this process, and the client shows the end of its log."""
        loop = asyncio.get_running_loop()
        self._operations = 0
        try:
            while self.in_flight:
                awaits = await loop.run_in_executor(self._thread, self._step, loop)
                while self._operations < awaits:  # on ranks other than the first they may be on their way
                    self._operated.clear()
                    await self._operated.wait()
        except Exception:  # noqa: BLE001 - no later request could be served either
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _step(self, loop: asyncio.AbstractEventLoop) -> int:
        """Steps of the engine, in its thread; sends responses as they end.

        Returns when operations wait (how many must be done before the next step) or nothing is left (0): a turn of the
        event loop for each step would cost its time. All ranks of an engine take the same steps, as the first one
        orders.
        """
        while self.in_flight:
            awaits = self._operations + self._waiting if self._waiting else 0
            is_due = time.monotonic() - self._beaten > self._beat_s
            order = compat.first_ranks(_Order(awaits, len(self._submitted), is_due))
            if order.awaits:
                return order.awaits
            for _ in range(order.admits):
                self._arrived.acquire()  # on other ranks the request may be on its way
                self._add(self._submitted[0])
                self._submitted.popleft()  # last: until then a heartbeat counts it here
            for output in self._engine.step():
                if self._note(output):
                    loop.call_soon_threadsafe(self._send, self._response(output))
            self._steps += 1
            if order.beats:
                self._beaten = time.monotonic()
                loop.call_soon_threadsafe(self._send, {"type": "beat", "in_step": True, **self.progress()})
        return 0

    def _add(self, message: Message) -> None:
        number, prompt, params = message["id"], message["token_ids"], message["params"]
        sampled = [message["key"], *params["sampling"], message["prompt_id"], message["start"]]
        extra = {ARGUMENT: sampled, HIDDEN: params["hidden"], PRE_ROLLED: message.get("pre_rolled", [])}
        sampling = adapter.vllm_sampling_params(params, extra)
        internal = self._engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        stops = self._stop_finder(params["stop"])
        self._live[str(number)] = _Live(number, internal, len(prompt), message["start"], stops)

    def _stop_finder(self, stop: list[str]) -> StopStringFinder | None:
        if not stop:
            return None
        if self._tokenizer is None:
            self._tokenizer = HFTokenizer(self._tokenizer_at)
        return StopStringFinder(self._tokenizer, stop)

    def _note(self, output: Any) -> bool:
        """Notes how long an output is; whether it has ended. At a stop string the engine drops the request."""
        live = self._live.get(output.request_id)
        if live is None:
            return False
        is_cut = live.read(output.outputs[0].token_ids)
        if is_cut and not output.finished:
            self._engine.abort_request([live.internal], internal=True)
        return is_cut or bool(output.finished)

    def _response(self, output: Any) -> Message:
        live, first = self._live[output.request_id], output.outputs[0]
        text = None if live.stops is None else live.stops.cut_text
        response = {
            "type": "response",
            "id": live.number,
            "token_ids": live.drawn,
            "finish_reason": first.finish_reason if text is None else "stop",
            **({} if text is None else {"text": text}),
            **self._kept(live),
        }
        del self._live[output.request_id]  # last: heartbeats count it until it can be sent
        return response

    def _kept(self, live: _Live) -> Message:
        """Writes what was kept of a response's positions, hidden states and experts, into a file for the client."""
        count = live.prompt_tokens + len(live.drawn) - 1
        (kept,) = self._engine.collective_rpc("tlt_end", args=(live.internal, count))
        if not kept:
            return {}
        path = self._directory / f"kept-{live.number}"
        write_shared(path, kept.items())
        return {"kept": str(path)}

    async def do_abort(self, _: Message) -> Message:
        """Drops everything in flight behind the step under way; it is served with finish_reason "cancelled"."""
        for number, drawn in (await self._in_thread(self._drop_all)).items():
            self._send({"type": "response", "id": number, "token_ids": drawn, "finish_reason": "cancelled"})
        return {}

    def _drop_all(self) -> dict[int, list[int]]:
        """Returns the numbers of the dropped requests, and the tokens of each."""
        dropped: dict[int, list[int]] = {message["id"]: [] for message in self._submitted}
        dropped |= {live.number: live.drawn for live in self._live.values()}
        internal = [live.internal for live in self._live.values()]
        for _ in self._submitted:
            self._arrived.acquire()
        self._submitted.clear()
        self._live.clear()
        self._engine.abort_request(internal, internal=True)
        for name in internal:
            self._engine.collective_rpc("tlt_end", args=(name, 0))
        return dropped

    # -- weight syncs and statistics --------------------------------------------------------------------------------

    async def do_begin_update(self, _: Message) -> Message:
        """Every layer waits for its weights."""
        await self._rpc("tlt_begin_update")
        return {}

    async def do_finish_update(self, _: Message) -> Message:
        """All tensors of the policy have come."""
        await self._rpc("tlt_finish_update")
        return {}

    async def do_sleep_cache(self, _: Message) -> Message:
        """Gives the KV cache's memory back; what is cached is lost."""
        await self._in_thread(adapter.sleep_cache, self._engine)
        return {}

    async def do_sleep_weights(self, _: Message) -> Message:
        """Gives back the KV cache's memory and the policy's weights, which the next weight sync brings."""
        await self._in_thread(adapter.sleep_weights, self._engine)
        return {}

    async def do_wake(self, message: Message) -> Message:
        """Takes the memory of `tags` again."""
        await self._in_thread(adapter.wake, self._engine, message["tags"])
        return {}

    async def do_stats(self, _: Message) -> Message:
        """Steps and drafts since the last call."""
        return dict(await self._rpc("tlt_stats"))

    @staticmethod
    def _end_of(engine: Any) -> Any:
        return engine.engine_core.shutdown


if __name__ == "__main__":
    main(VllmHost, *sys.argv[1:])
