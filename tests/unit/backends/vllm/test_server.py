"""vLLM's server around a toy engine: a failure of the engine ends the process, an abort ends every request."""

from __future__ import annotations

import asyncio
import os
import threading
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
    """Two steps a request, or more while `endless`; the call named `failing` raises."""

    def __init__(self) -> None:
        self.failing, self.endless = "", False
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
            self.lengths[name] += not self.endless
            finished = self.lengths[name] == 2
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
    """A VllmHost, its engine, and the responses that it has sent."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.responses = ToyEngine(), []  # type: tuple[ToyEngine, list[Message]]
        monkeypatch.setattr(server.adapter, "start_engine", lambda llm: self.engine)
        monkeypatch.setattr(server.adapter, "vllm_sampling_params", lambda params, extra: None)
        self.folder, self.host = folder, server.VllmHost(self.responses.append)

    async def start(self, stop: tuple[str, ...] = ()) -> None:
        names = ("llm", "hidden_bytes", "max_len", "max_requests", "speculation", "routed_experts")
        about = {"directory": str(self.folder), "tokenizer": str(self.folder / "none"), "stop": list(stop)}
        await self.host.do_start({**dict.fromkeys(names), **about})

    def submit(self, *numbers: int) -> None:
        for n in numbers:
            self.host.submit({"id": n, "key": n, "prompt_id": 0, "token_ids": [1, 2], "params": PARAMS})


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    return Talk(tmp_path, monkeypatch)


@pytest.mark.parametrize("what", ["add_request", "step", "tlt_end", "save_file"])
def test_a_failure_of_the_engine_ends_the_process(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr(server, "save_file", lambda kept, path: talk.engine._call("save_file"))

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
        talk.engine.add_request = lambda *of: seen.append(talk.host.in_flight) or add(*of)  # type: ignore[method-assign,func-returns-value]
        talk.submit(1, 2)
        await talk.host._stepping
        assert seen == [2, 2], "a request that is being added is counted"

    asyncio.run(go())
    assert {a["id"]: a["token_ids"] for a in talk.responses} == {1: [5, 5], 2: [5, 5]}
    assert load_file(talk.responses[0]["kept"]).keys() == {"hidden", "routed_experts"}


def test_a_tokenizer_that_cannot_be_read_ends_the_start(talk: Talk) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        asyncio.run(talk.start(stop=("x",)))


def test_what_is_aborted_is_answered_before_the_reply(talk: Talk) -> None:
    async def go() -> None:
        await talk.start()
        talk.engine.endless = True
        talk.submit(1, 2)
        await asyncio.sleep(0.01)
        talk.submit(3)
        await talk.host.do_abort({})
        assert {a["id"]: a["finish_reason"] for a in talk.responses} == dict.fromkeys((1, 2, 3), "cancelled")
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
