"""vLLM's process: runs in vLLM's own environment, where the package of this file is on the path, without our torch.

    rank                                  this process
    VllmBackend --- Unix socket --- event loop --- one thread ---- LLMEngine and, in the same process, its worker
                    shared memory: weights ->, hidden states of answers <-

The engine is used by its thread only, which steps until an operation waits for it, so that requests are batched in the
order in which they came, and weights change between two steps. Messages are those of `trtllm/server.py`; here submit's
requests carry `key`, an answer may carry `hidden` and `routes` (entries of `entries.py` whose files the client removes)
and `text` (up to the stop string that ended it), and

| from the client | answer |
|---|---|
| start(llm, hidden_bytes, max_requests, max_len, speculation, routes, directory, tokenizer, stop) | reply |
| collect(on) | reply; whether answers carry hidden states from now on |
| begin_update(.., only_drafter) | as in `trtllm/server.py`; only_drafter: also while requests run |
| speculation() | reply: state, what selector and calibration have learned |
| load_speculation(state) | reply |
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tlt.backends.entries import describe, tensor_bytes
from megatron_tlt.backends.receiving import PushReceiver
from megatron_tlt.backends.serving import dispatch, main
from megatron_tlt.backends.vllm.plugin import door
from megatron_tlt.backends.vllm.plugin.keyed import ARGUMENT
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.rollout.stops import StopStringFinder

Message = dict[str, Any]


@dataclass(slots=True)
class _Live:
    """A request in the engine."""

    number: int  # the client's
    internal: str  # vLLM's name
    prompt_len: int
    stops: StopStringFinder | None
    length: int = 0  # output tokens so far

    def read(self, token_ids: Sequence[int]) -> bool:
        """Notes the answer so far; whether a stop string has ended it. Mutates."""
        for token in token_ids[self.length :]:
            self.length += 1
            if self.stops is not None and self.stops.push(token):
                return True
        return False


class Host:
    """One engine and the requests in it. `send` queues messages for the client; called in the event loop only."""

    def __init__(self, send: Callable[[Message], None]):
        self._send = send
        self._engine: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._push = PushReceiver(self._load)
        self._only_drafter = False  # the push under way replaces the drafter between two steps
        self._submitted: deque[Message] = deque()  # not in the engine yet
        self._waiting = 0  # operations that wait for the engine's thread
        self._live: dict[str, _Live] = {}  # by external id
        self._stepping: asyncio.Task[None] | None = None
        self._collects = False
        self._directory = self._tokenizer_at = Path()
        self._tokenizer: HFTokenizer | None = None  # read for the first stop string
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
        return {"lengths": [live.length for live in list(self._live.values()) if live.length]}

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
            "finish_update": self._finish_update,
            "stats": self._stats,
            "speculation": self._speculation,
            "load_speculation": self._load_speculation,
        }
        return await dispatch(operations, message)

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of an operation between two steps."""
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        finally:
            self._waiting -= 1

    async def _rpc(self, method: str, *args: Any) -> Any:
        """The worker's result; there is one worker."""
        return (await self._in_thread(lambda: self._engine.collective_rpc(method, args=args)))[0]

    async def _start(self, message: Message) -> Message:
        self._directory, self._tokenizer_at = Path(message["directory"]), Path(message["tokenizer"])
        self._stop_finder(message["stop"])  # a tokenizer that cannot be read ends the start, not an answer
        self._engine = await self._in_thread(door.start_engine, message["llm"])
        names = ("hidden_bytes", "max_len", "max_requests", "speculation", "routes")
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
        loop = asyncio.get_running_loop()
        while self.in_flight:  # also those that came while a failure was answered
            try:
                if not self._only_drafter:
                    self._push.check_closed()
                await loop.run_in_executor(self._thread, self._step, loop)
            except Exception as error:  # noqa: BLE001 - every failure is sent to the client under its requests
                traceback.print_exc()
                await self._fail(f"{type(error).__name__}: {error}")

    async def _fail(self, why: str) -> None:
        try:
            await self._drop(error=why)
        except Exception:  # noqa: BLE001 - the answers have been sent, with what failed first
            traceback.print_exc()

    def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        """Steps of the engine, in its thread; sends answers as they end.

        Returns when an operation waits or nothing is left: a turn of the event loop for each step would cost its time.
        """
        while self.in_flight and not self._waiting:
            while self._submitted:
                self._add(self._submitted.popleft())
            for output in self._engine.step():
                if self._note(output):
                    loop.call_soon_threadsafe(self._send, self._answer(output))

    def _add(self, message: Message) -> None:
        request, params = message["request"], message["params"]
        number, prompt = request["id"], message["token_ids"]
        extra = {ARGUMENT: [request["key"], *params["sampling"], request["prompt_id"]]}
        live = self._live[str(number)] = _Live(number, "", len(prompt), None)  # before anything can raise
        live.stops = self._stop_finder(params["stop"])
        live.internal = self._engine.add_request(
            str(number), {"prompt_token_ids": prompt}, door.sampling_params(params, extra)
        )

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

    def _answer(self, output: Any) -> Message:
        live, first = self._live[output.request_id], output.outputs[0]
        text = None if live.stops is None else live.stops.cut_text
        answer = {
            "type": "answer",
            "id": live.number,
            "token_ids": list(first.token_ids[: live.length]),
            "finish_reason": first.finish_reason if text is None else "stop",
            **({} if text is None else {"text": text}),
            **self._kept(live.internal, live.prompt_len + live.length - 1),
        }
        del self._live[output.request_id]  # last: what fails before is answered with the error
        return answer

    def _kept(self, internal: str, count: int) -> dict[str, Message]:
        """Writes what was kept of an answer's positions, hidden states and experts, into files for the client.

        Leaves none of them where it raises.
        """
        (kept,) = self._engine.collective_rpc("tlt_end", args=(internal, count))
        if not self._collects:
            kept.pop("hidden", None)
        self._files += 1
        entries = {}
        paths = {name: self._directory / f"{name}-{self._files}" for name in kept}
        try:
            for name, tensor in kept.items():
                paths[name].write_bytes(tensor_bytes(tensor))
                entries[name] = {**describe(name, tensor), "file": str(paths[name]), "offset": 0}
        except BaseException:
            for path in paths.values():
                path.unlink(missing_ok=True)
            raise
        return entries

    async def _collect(self, message: Message) -> Message:
        self._collects = bool(message["on"])
        await self._rpc("tlt_collect", self._collects)
        return {}

    async def _abort(self, _: Message) -> Message:
        """What runs is answered with finish_reason "cancelled"."""
        await self._drop(token_ids=[], finish_reason="cancelled")
        return {}

    async def _drop(self, **answer: Any) -> None:
        """Drops everything in flight behind the step under way and answers it so, also where the engine raises."""
        numbers: list[int] = []
        try:
            await self._in_thread(self._drop_all, numbers)
        finally:
            for number in numbers:
                self._send({"type": "answer", "id": number, **answer})

    def _drop_all(self, numbers: list[int]) -> None:
        """Adds the dropped requests to `numbers`. The event loop may submit others meanwhile."""
        live, self._live = self._live, {}
        while self._submitted:
            numbers.append(self._submitted.popleft()["request"]["id"])
        numbers += [request.number for request in live.values()]
        internal = [request.internal for request in live.values() if request.internal]
        if internal:
            self._engine.abort_request(internal, internal=True)
        for name in internal:
            self._engine.collective_rpc("tlt_end", args=(name, 0))

    # -- pushes and figures -----------------------------------------------------------------------------------

    async def _begin_update(self, message: Message) -> Message:
        self._only_drafter = message.get("only_drafter", False)
        self._push.begin(message, 0 if self._only_drafter else self.in_flight)
        if not self._only_drafter:
            await self._rpc("tlt_begin_update")
        return {}

    async def _load(self, entries: list[Message], verify: bool) -> dict[str, int]:
        sums: dict[str, int] = await self._rpc("tlt_update", entries, verify)
        return sums

    async def _finish_update(self, message: Message) -> Message:
        entries = self._push.drafter_of(message["version"])
        if not self._only_drafter:
            await self._rpc("tlt_finish_update")
            await self._in_thread(self._engine.reset_prefix_cache)
        sums: dict[str, int] = {}
        if entries:
            sums = await self._rpc("tlt_update_drafter", entries, self._push.verify)
        return self._push.close(sums)

    async def _stats(self, _: Message) -> Message:
        return dict(await self._rpc("tlt_stats"))

    async def _speculation(self, _: Message) -> Message:
        return {"state": await self._rpc("tlt_speculation")}

    async def _load_speculation(self, message: Message) -> Message:
        await self._rpc("tlt_load_speculation", message["state"])
        return {}

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
