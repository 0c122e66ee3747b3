"""vLLM's server around a toy engine: a failure of the engine ends the process, an abort ends every request."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_tlt.backends.vllm import server
from megatron_tlt.errors import CheckpointError

PARAMS = {"sampling": [1.0, 0, 1.0, 0.0], "stop": [], "hidden": True, "max_tokens": 2}
Message = dict[str, Any]


class ToyEngine:
    """`most` tokens a request, or only the first while `endless`; the call named `failing` raises."""

    def __init__(self) -> None:
        self.failing, self.endless, self.most = "", False, 2
        self.lengths: dict[str, int] = {}
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def _call(self, name: str) -> None:
        assert threading.current_thread().name.startswith("engine")
        if self.failing == name:
            raise OSError(f"{name} failed")

    def add_request(self, name: str, prompt: Any, params: Any) -> str:
        self._call("add_request")
        self.lengths[name] = 0
        return f"{name}-internal"

    def step(self) -> list[Any]:
        self._call("step")
        outputs = []
        for name in list(self.lengths):
            self.lengths[name] += not self.endless or not self.lengths[name]
            finished = self.lengths[name] == self.most
            response = SimpleNamespace(token_ids=[5] * self.lengths[name], finish_reason="length")
            outputs.append(SimpleNamespace(request_id=name, outputs=[response], finished=finished))
            if finished:
                del self.lengths[name]
        return outputs

    def abort_request(self, names: list[str], internal: bool) -> None:
        self._call("abort_request")
        for name in names:
            self.lengths.pop(name.removesuffix("-internal"), None)

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self._call(method)
        return [{"hidden": torch.ones(3, 2), "routed_experts": torch.ones(3, 1)} if method == "tlt_end" else {}]


class Talk:
    """A VllmHost, its engine, and the responses and heartbeats that it has sent."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.responses = ToyEngine(), []  # type: tuple[ToyEngine, list[Message]]
        monkeypatch.setattr(server.adapter, "start_engine", lambda llm, records_routers: self.engine)
        monkeypatch.setattr(server.compat, "first_ranks", lambda order: order)
        self.starts: list[int] = []
        self.pre_rolled: list[list[int]] = []

        def note(_: Any, extra: dict[str, Any]) -> None:
            self.starts.append(extra[server.ARGUMENT][-1])
            self.pre_rolled.append(extra[server.PRE_ROLLED])

        monkeypatch.setattr(server.adapter, "vllm_sampling_params", note)
        self.folder, self.host = folder, server.VllmHost(self.responses.append)

    async def start(self, stop: tuple[str, ...] = (), tp: int = 1) -> None:
        names = ("llm", "hidden_bytes", "max_len", "max_requests", "speculation", "routed_experts", "verify_rows")
        about = {"directory": str(self.folder), "tokenizer": str(self.folder / "none"), "stop": list(stop)}
        await self.host.do_start({**dict.fromkeys(names), "llm": {"tensor_parallel_size": tp}, "beat_s": 0.0, **about})

    def submit(self, *numbers: int, **more: Any) -> None:
        for n in numbers:
            message = {"id": n, "key": n, "prompt_id": 0, "token_ids": [1, 2], "start": 1, "params": PARAMS}
            self.host.submit({**message, **more})


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    return Talk(tmp_path, monkeypatch)


@pytest.mark.parametrize("what", ["add_request", "step", "tlt_end", "write_shared"])
def test_a_failure_of_the_engine_ends_the_process(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr(server, "write_shared", lambda path, kept: talk.engine._call("write_shared"))

    async def go() -> None:
        await talk.start()
        talk.engine.failing = what
        talk.submit(1, 2)
        await talk.host._stepping

    asyncio.run(go())
    assert ends == [1] and f"OSError: {what} failed" in capfd.readouterr().err


def test_responses_bring_what_was_kept(talk: Talk) -> None:
    async def go() -> None:
        await talk.start()
        add, seen = talk.engine.add_request, []
        step = talk.engine.step
        talk.engine.step = lambda: lengths.append(talk.host.progress()["lengths"]) or step()  # type: ignore[method-assign,func-returns-value]
        talk.engine.add_request = lambda *of: seen.append(talk.host.in_flight) or add(*of)  # type: ignore[method-assign,func-returns-value]
        talk.submit(1, 2)
        await talk.host._stepping
        assert seen == [2, 2], "a request that is being added is counted"
        assert talk.host.progress() == {"steps": 2, "lengths": []}

    lengths: list[list[int]] = []
    asyncio.run(go())
    assert lengths == [[], [2, 2]] and talk.starts == [1, 1], "the prompts' last token is of an earlier turn"
    assert {a["id"]: a["token_ids"] for a in talk.responses} == {1: [5, 5], 2: [5, 5]}
    assert load_file(talk.responses[0]["kept"]).keys() == {"hidden", "routed_experts"}


def test_a_tokenizer_that_cannot_be_read_ends_the_start(talk: Talk) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        asyncio.run(talk.start(stop=("x",)))


def test_what_is_aborted_is_answered_before_the_reply(talk: Talk) -> None:
    async def go() -> None:
        await talk.start()
        talk.engine.endless = True
        talk.submit(1)
        talk.submit(2, pre_rolled=[7, 8])
        while talk.host.progress()["lengths"] != [2, 2]:
            await asyncio.sleep(0.01)
        talk.submit(3)
        await talk.host.do_abort({})
        assert {a["id"]: a["finish_reason"] for a in talk.responses} == dict.fromkeys((1, 2, 3), "cancelled")
        drawn = {a["id"]: a["token_ids"] for a in talk.responses}
        assert drawn[1] == drawn[2] == [5] and drawn[3] in ([], [5])
        assert talk.pre_rolled[:2] == [[], [7, 8]]
        await talk.host._stepping
        assert talk.host.in_flight == 0 and talk.engine.lengths == {}

    asyncio.run(go())


def test_a_drafter_is_replaced_while_a_request_runs(talk: Talk) -> None:
    async def go() -> None:
        await talk.start()
        talk.engine.endless = True
        talk.submit(1)
        await asyncio.sleep(0.01)
        try:
            async with asyncio.timeout(5):
                assert "checksums" in await talk.host.do_drafter({"tensors": [], "verify": False})
        finally:
            talk.engine.endless = False
        assert talk.responses == [] and talk.host.in_flight == 1
        await talk.host._stepping
        assert [(a["id"], a["token_ids"], a["finish_reason"]) for a in talk.responses] == [(1, [5, 5], "length")]

    asyncio.run(go())


class Ranks:
    """Two processes of one engine: the first one's orders, in a queue that the other one reads."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.talks = [Talk(folder, monkeypatch) for _ in range(2)]
        self.orders: queue.Queue[Any] = queue.Queue()
        self.logs: tuple[list[Any], list[Any]] = ([], [])
        for rank, talk in enumerate(self.talks):
            talk.host._thread = ThreadPoolExecutor(1, thread_name_prefix=f"engine {rank}")
            talk.engine.step, talk.engine.add_request = self.logged(rank, "step"), self.logged(rank, "add_request")  # type: ignore[method-assign]
        monkeypatch.setattr(server.compat, "first_ranks", self.first_ranks)

    def first_ranks(self, order: Any) -> Any:
        if threading.current_thread().name.startswith("engine 0"):
            self.orders.put(order)
            return order
        return self.orders.get(timeout=5)

    def logged(self, rank: int, name: str) -> Any:
        call = getattr(self.talks[rank].engine, name)
        return lambda *of: self.logs[rank].append((name, *of[:1])) or call(*of)


def test_ranks_of_an_engine_take_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests and an abort that reach the ranks in either order and at other times."""
    ranks = Ranks(tmp_path, monkeypatch)
    first, second = ranks.talks

    async def go() -> None:
        for talk in ranks.talks:
            monkeypatch.setattr(server.adapter, "start_engine", lambda llm, records_routers, of=talk: of.engine)
            await talk.start(tp=2)
            talk.engine.most = 2000
        for talk in (second, first, first, second):
            talk.submit(talk.host.last_request)
            talk.host.last_request += 1
            await asyncio.sleep(0.02)
        await asyncio.gather(*(talk.host._stepping for talk in ranks.talks))
        for talk in ranks.talks:
            talk.engine.endless = True
            talk.submit(7)
        for talk in (first, second):
            await asyncio.sleep(0.02)
            await talk.host.do_abort({})
        await asyncio.gather(*(talk.host._stepping for talk in ranks.talks))

    asyncio.run(asyncio.wait_for(go(), 20))
    assert ranks.logs[0] == ranks.logs[1] and ("add_request", "7") in ranks.logs[0]
    sent = [[m["type"], m.get("id")] for m in first.responses]
    assert sent == [[m["type"], m.get("id")] for m in second.responses]
    assert [n for kind, n in sent if kind == "response"] == [0, 1, 7] and ["beat", None] in sent
