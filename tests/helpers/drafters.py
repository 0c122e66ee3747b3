"""Drafters and selectors that test the engine: they know the responses, or lie, and change their minds at random."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.rollout.engine import Engine
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.speculation.speculator import Speculator
from megatron_tlt.types import NO_DRAFT, DraftStrategy, StepMeasurement
from tests.helpers.engines import Responses


class OracleDrafter:
    """Proposes the known response of each request, each token spoiled with probability `spoil`."""

    kind = "oracle"

    def __init__(self, responses: Responses, vocab: int, spoil: float, seed: int = 0):
        self.responses, self.vocab, self.spoil = responses, vocab, spoil
        self.random = random.Random(seed)
        self.live: dict[int, list[int]] = {}  # Request.order -> tokens so far

    def start(self, request: Request) -> None:
        seen = self.live.get(request.order, [])
        assert request.output[: len(seen)] == seen  # it may have been preempted
        self.live[request.order] = list(request.output)

    def sync_context(self, rows: RunningRows) -> None:
        for request in rows.requests:
            seen = self.live[request.order]
            drawn = rows.outputs[request.slot, : int(rows.output_len[request.row])].tolist()
            assert drawn[: len(seen)] == seen
            self.live[request.order] = drawn

    def finish(self, request: Request) -> None:
        seen = self.live.pop(request.order, [])
        assert seen == request.output[: len(seen)]
        known = self.responses.get((request.prompt_id, request.sample_index))
        assert known is None or request.output == known[0][: len(request.output)]

    def end_generate(self) -> None:
        assert not self.live

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def propose(self, rows: RunningRows, lengths: np.ndarray, strategy: DraftStrategy) -> Draft:
        counts, tokens, likely = [], [], []
        for row, length in enumerate(lengths.tolist()):
            request = rows.requests[row]
            done = int(rows.output_len[row])
            assert self.live[request.order] == rows.outputs[request.slot, :done].tolist()
            known = self.responses.get((request.prompt_id, request.sample_index), ([], []))[0][done:]
            drafted = [self._token(known, at) for at in range(length)]
            counts.append(length)
            tokens += drafted
            likely += [0.7**at for at in range(1, length + 1)]
        return Draft(np.array(counts, np.int32), np.array(tokens, np.int32), np.array(likely, np.float32))

    def _token(self, truth: list[int], at: int) -> int:
        if at < len(truth) and self.random.random() >= self.spoil:
            return truth[at]
        return self.random.randrange(self.vocab)

    def observe(self, draft: Draft, reached: np.ndarray, accepted: np.ndarray) -> None:
        assert len(reached) == len(accepted) == draft.num_tokens
        assert not (accepted & ~reached).any()


class RandomSelector:
    """Any length and any least acceptance, at random; sometimes plain decoding."""

    def __init__(self, kind: str, longest: int, seed: int = 0):
        self.kind, self.longest = kind, longest
        self.random = random.Random(seed)
        self.emitted = self.rows = 0

    def select(self, num_running: int) -> DraftStrategy:
        if self.random.random() < 0.2:
            return NO_DRAFT
        return DraftStrategy(self.kind, self.random.randint(1, self.longest), self.random.choice((0.0, 0.3)))

    def record(self, measurement: StepMeasurement) -> None:
        assert measurement.num_emitted >= measurement.num_running
        assert (measurement.accepted <= measurement.reached).all()
        self.emitted += measurement.num_emitted
        self.rows += measurement.num_running

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def attach(engine: Engine, drafter, selector) -> Speculator:
    """Makes a plain engine speculate with these parts."""
    scheduler = engine.scheduler
    speculator = Speculator(drafter, selector, scheduler.rows, scheduler.reserve, engine.runner.tp)
    engine.speculator = speculator
    return speculator
