"""Every request that was submitted is answered, whatever fails in the engine: the server's Host around a toy engine."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_tlt.backends.vllm import server
from megatron_tlt.errors import CheckpointError

PARAMS = {"sampling": [1.0, 0, 1.0, 0.0], "stop": [], "max_tokens": 2}
Message = dict[str, Any]


class ToyEngine:
    """Two steps a request; calls named in `failing` raise, each so often."""

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}
        self.lengths: dict[str, int] = {}
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def _call(self, name: str) -> None:
        if self.failing.get(name):
            self.failing[name] -= 1
            raise OSError(f"{name} failed")

    def add_request(self, name: str, prompt: Any, params: Any) -> str:
        self._call("add_request")
        self.lengths[name] = 0
        return f"{name}-internal"

    def step(self) -> list[Any]:
        self._call("step")
        outputs = []
        for name in list(self.lengths):
            self.lengths[name] += 1
            finished = self.lengths[name] == 2
            answer = SimpleNamespace(token_ids=[5] * self.lengths[name], finish_reason="length")
            outputs.append(SimpleNamespace(request_id=name, outputs=[answer], finished=finished))
            if finished:
                del self.lengths[name]
        return outputs

    def abort_request(self, names: list[str], internal: bool) -> None:
        self._call("abort_request")
        for name in names:
            self.lengths.pop(name.removesuffix("-internal"), None)

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self._call(method)
        return [{"hidden": torch.ones(3, 2), "routes": torch.ones(3, 1)} if method == "tlt_end" else {}]


class Talk:
    """A Host, its engine, and the answers that it has sent."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.answers = ToyEngine(), []  # type: tuple[ToyEngine, list[Message]]
        monkeypatch.setattr(server.door, "start_engine", lambda llm: self.engine)
        monkeypatch.setattr(server.door, "sampling_params", lambda params, extra: None)
        self.folder, self.host = folder, server.Host(self.answers.append)

    async def start(self, stop: tuple[str, ...] = ()) -> None:
        names = ("llm", "hidden_bytes", "max_len", "max_requests", "speculation", "routes")
        about = {"directory": str(self.folder), "tokenizer": str(self.folder / "none"), "stop": list(stop)}
        await self.host.handle({"type": "start", **dict.fromkeys(names), **about})
        await self.host.handle({"type": "collect", "on": True})

    def submit(self, *numbers: int, stop: tuple[str, ...] = ()) -> None:
        requests = [{"id": n, "key": n, "prompt_id": 0} for n in numbers]
        params = {**PARAMS, "stop": list(stop)}
        self.host.submit({"requests": requests, "token_ids": [1, 2], "params": params})

    async def ids(self) -> dict[int, str]:
        """The answers since the last call, once nothing is in flight: what each says."""
        async with asyncio.timeout(5):
            while self.host._stepping is not None and not self.host._stepping.done():
                await asyncio.sleep(0.001)
        assert self.host.in_flight == 0
        said = {a["id"]: a.get("error") or a["finish_reason"] for a in self.answers}
        assert len(said) == len(self.answers), "one answer each"
        self.answers.clear()
        return said


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    return Talk(tmp_path, monkeypatch)


@pytest.mark.parametrize("what", ["add_request", "step", "tlt_end"])
@pytest.mark.parametrize("then", [None, "abort_request", "tlt_end"])
def test_a_failure_of_the_engine_is_the_answer_of_every_request(talk: Talk, what: str, then: str | None) -> None:
    async def go() -> None:
        await talk.start()
        talk.engine.failing = {then: 9} if then else {}
        talk.engine.failing[what] = 9
        talk.submit(1, 2)
        talk.submit(3)
        said = await talk.ids()
        assert set(said) == {1, 2, 3} and set(said.values()) == {f"OSError: {what} failed"}
        talk.engine.failing = {}
        talk.engine.lengths.clear()
        talk.submit(4)
        assert await talk.ids() == {4: "length"}, "and the engine goes on"

    asyncio.run(go())


def test_a_request_that_comes_while_a_failure_is_answered_is_answered(talk: Talk) -> None:
    async def go() -> None:
        await talk.start()
        talk.engine.failing = {"step": 1}
        drop = talk.host._drop

        async def drop_and_submit(**answer: Any) -> None:
            await drop(**answer)
            talk.submit(2)

        talk.host._drop = drop_and_submit  # type: ignore[method-assign]
        talk.submit(1)
        assert await talk.ids() == {1: "OSError: step failed", 2: "length"}

    asyncio.run(go())


def test_a_tokenizer_that_cannot_be_read_ends_the_start_or_the_request(talk: Talk) -> None:
    async def go() -> None:
        with pytest.raises(CheckpointError, match="no such directory"):
            await talk.start(stop=("x",))
        await talk.start()
        talk.submit(1, stop=("x",))
        (why,) = (await talk.ids()).values()
        assert "no such directory" in why

    asyncio.run(go())


def test_a_full_disk_is_an_answer_and_leaves_no_file(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def fill(path: Path, data: Any) -> int:
        write(path, bytes(data)[:4])
        if path.name.startswith("routes"):
            raise OSError("no space left")
        return 4

    async def go() -> None:
        await talk.start()
        monkeypatch.setattr(Path, "write_bytes", fill)
        talk.submit(1, 2)
        assert set((await talk.ids()).items()) == {(n, "OSError: no space left") for n in (1, 2)}
        assert list(talk.folder.iterdir()) == []
        monkeypatch.undo()

    asyncio.run(go())


@pytest.mark.parametrize("failing", [None, "abort_request", "tlt_end"])
def test_what_is_aborted_is_answered_before_the_reply(talk: Talk, failing: str | None) -> None:
    async def go() -> None:
        await talk.start()
        talk.engine.failing = {failing: 9} if failing else {}
        step = talk.engine.step

        def endless() -> list[Any]:
            talk.engine.lengths = dict.fromkeys(talk.engine.lengths, 0)
            return step()

        talk.engine.step = endless  # type: ignore[method-assign]
        talk.submit(1, 2)
        await asyncio.sleep(0.01)
        talk.submit(3)
        with pytest.raises(OSError, match=f"{failing} failed") if failing else nullcontext():
            await talk.host.handle({"type": "abort"})
        assert {a["id"]: a["finish_reason"] for a in talk.answers} == dict.fromkeys((1, 2, 3), "cancelled")
        assert await talk.ids()

    asyncio.run(go())


def test_a_swap_of_the_drafter_disturbs_no_request(talk: Talk) -> None:
    async def go() -> None:
        await talk.start()
        begin = {"type": "begin_update", "version": 1, "verify": False}
        talk.submit(1)
        await talk.host.handle({**begin, "only_drafter": True})  # both were in the reader's buffer
        assert await talk.ids() == {1: "length"}
        talk.submit(2)  # the swap has failed: nothing closes its push
        assert await talk.ids() == {2: "length"}
        await talk.host.handle(begin)
        talk.submit(3)
        assert await talk.ids() == {3: "RuntimeError: the push of version 1 has not finished"}

    asyncio.run(go())
