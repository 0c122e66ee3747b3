from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_tlt.backends.vllm.backend import VllmBackend
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.models.config import EMBED, HEAD
from megatron_tlt.sync.served_weights import ServedWeights
from megatron_tlt.trainer.stolen_requests import StolenRequests
from megatron_tlt.types import Prompt, SamplingParams, WeightBucket


def test_kept_tables_are_copied_in_place_from_the_second_push_on() -> None:
    process = SimpleNamespace(launch=SimpleNamespace(name="vLLM"))
    transport = SimpleNamespace(send=lambda version, tensors: None)
    weights = ServedWeights({EMBED: (5, 2), HEAD: (5, 2)}, (), False)
    rollout = RolloutSection(order="arrival", dtype="bf16")
    backend = VllmBackend(
        process, transport, weights, rollout, max_context=8, directory=None, keeps_tables=True
    )
    addresses = set()
    for version in (0, 1):
        pushed = {name: torch.full((5, 2), version + i / 2) for i, name in enumerate((EMBED, HEAD))}
        weights.begin(version)
        backend.update_weights(WeightBucket(version, list(pushed.items())))
        weights.commit({})
        tables = backend.lookup_tables()
        for table, tensor in zip(tables, pushed.values(), strict=True):
            assert table.dtype == torch.bfloat16 and torch.equal(table.float(), tensor)
        addresses.add(tuple(table.data_ptr() for table in tables))
        pushed[EMBED].fill_(9)  # the sender's buffer is used again
    assert len(addresses) == 1 and tables[0].eq(1).all()


class ToyProcess:
    """An engine's process that answers the request it has had longest; an answer's token is its key's last digits."""

    launch = SimpleNamespace(name="vLLM")
    is_alive = True

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.most = 0

    def send(self, message: dict[str, Any]) -> None:
        self.requests += message["requests"]
        self.most = max(self.most, len(self.requests))

    def next_answer(self) -> dict[str, Any]:
        request = self.requests.pop(0)
        tokens = [request["key"] % 1000]
        return {"type": "answer", "id": request["id"], "token_ids": tokens, "finish_reason": "length"}


def test_requests_that_have_not_begun_are_answered_by_another_engine() -> None:
    """In two engines that hold three requests at a time: the same answers as in one, and none twice."""
    prompts = [Prompt(i, f"q{i}", (1, 2), "?") for i in range(4)]
    params = SamplingParams(max_tokens=4, seed=3)

    def make(most: int) -> tuple[VllmBackend, ToyProcess]:
        process, weights = ToyProcess(), ServedWeights({EMBED: (5, 2)}, (), False)
        weights.begin(0)
        weights.mark_loaded([(EMBED, torch.zeros(5, 2))])
        weights.commit({})
        rollout = RolloutSection(order="arrival", max_running_requests=most)
        return VllmBackend(process, None, weights, rollout, max_context=8, directory=None), process

    alone = make(64)[0].generate(prompts, params, 5)
    (backend, process), (other, _) = make(3), make(3)
    victim, thief = (StolenRequests(b, params, 5, None) for b in (backend, other))  # type: ignore[arg-type]
    ranges, waiting = [], []

    def steal(running: int, queued: int, generated: int) -> None:
        waiting.append((running, queued))
        if len(waiting) in (2, 5):
            ranges.extend(victim.withdraw_share())
            assert victim.num_queued() < queued

    mine = backend.generate(prompts, params, 5, steal)
    theirs = thief.generate({p.prompt_id: p for p in prompts}, ranges, None, lambda *_: None)
    assert theirs and process.most == 3 and waiting[0] == (3, 16)
    key = [(s.prompt_id, s.sample_index, s.token_ids) for s in alone]
    assert sorted((s.prompt_id, s.sample_index, s.token_ids) for s in [*mine, *theirs]) == key


def test_an_interrupted_rollout_leaves_no_queue() -> None:
    weights = ServedWeights({EMBED: (5, 2)}, (), False)
    weights.begin(0)
    weights.mark_loaded([(EMBED, torch.zeros(5, 2))])
    weights.commit({})
    process = ToyProcess()
    process.call = lambda *_: None  # type: ignore[attr-defined]
    rollout = RolloutSection(order="arrival", max_running_requests=2)
    backend = VllmBackend(process, None, weights, rollout, max_context=8, directory=None)

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    prompts = [Prompt(0, "q", (1, 2), "?")]
    with pytest.raises(KeyboardInterrupt):
        backend.generate(prompts, SamplingParams(max_tokens=4), 9, interrupt)
    assert backend.num_unstarted == 0 and not process.requests
