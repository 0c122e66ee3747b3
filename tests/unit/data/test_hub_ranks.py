"""Names on the hub that several ranks fetch."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.data import hub as hub_module
from megatron_tlt.data.hub import fetch_argument
from megatron_tlt.errors import ConfigError, ConfigProblem
from tests.helpers import thread_ranks
from tests.helpers.hub_server import Hub
from tests.helpers.thread_ranks import ThreadRank


class OneOfFour(ThreadRank):
    """Ranks 0 and 1 on host a, 2 and 3 on host b."""

    current = threading.local()
    calls: list[tuple[int, str]]

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def wait_for_all(self) -> None:
        self.calls.append((self.rank, "wait"))
        super().wait_for_all()

    def all_gather_object(self, value: Any) -> list[Any]:
        self.calls.append((self.rank, "gather"))
        return super().all_gather_object(value)


def fetched_by_four(monkeypatch: pytest.MonkeyPatch, download: Any) -> list[Path | str]:
    """What `fetch_argument` of a/policy returns or raises on every rank, where leaders call `download(rank, ...)`."""
    monkeypatch.setattr(OneOfFour, "calls", [], raising=False)
    rank_of_thread = OneOfFour.current
    monkeypatch.setattr(socket, "gethostname", lambda: "ab"[rank_of_thread.rank // 2])
    monkeypatch.setattr(hub_module, "_download_all", lambda *args: download(rank_of_thread.rank, *args))

    def body(rank: ThreadRank) -> Path | str:
        rank_of_thread.rank = rank.rank
        try:
            return fetch_argument("--model", Path("a/policy"), rank)
        except ConfigError as error:
            return str(error)

    monkeypatch.setattr(thread_ranks, "ThreadRank", OneOfFour)
    return thread_ranks.on_ranks(4, body)


def test_the_first_rank_of_a_node_fetches_and_the_others_wait_in_no_collective(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, leaders = hub_module._download_all, []

    def download(rank: int, *args: Any) -> Any:
        leaders.append(rank)
        return real(*args)

    directories = fetched_by_four(monkeypatch, download)
    assert len(set(directories)) == 1 and (Path(directories[3]) / "model.safetensors").is_file()
    assert sorted(leaders) == [0, 2]
    # A broadcast is a gather here.
    assert [call for rank, call in OneOfFour.calls if rank == 3] == ["gather", "gather", "wait", "gather"]
    assert len(hub.fetched("/model.safetensors")) == 1, "nodes that share a cache fetch a file once"


def test_a_node_that_cannot_fetch_ends_the_ranks_of_all(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    real = hub_module._download_all
    problem = ConfigProblem("--model", "a/policy", "cannot be written")
    told = fetched_by_four(monkeypatch, lambda rank, *args: ({}, [problem]) if rank == 2 else real(*args))
    assert told == [str(problem)] * 4
