"""Drafters and selectors that test the engine: they know the responses, or lie, and change their minds at random."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_tlt.rollout.engine import Engine
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.speculator import Speculator
from megatron_tlt.types import NO_DRAFT, DraftStrategy, StepMeasurement
from tests.helpers.engines import Responses


class OracleDrafter:
    """Proposes the known response of each request, each token spoiled with probability `spoil`.

    With `tree`, siblings (wrong, or right where the trunk is spoiled) stand beside the trunk, some of them with
    children of their own, in a random shape.
    """

    kind = "oracle"

    def __init__(self, responses: Responses, vocab: int, spoil: float, tree: bool, seed: int = 0):
        self.responses, self.vocab, self.spoil, self.tree = responses, vocab, spoil, tree
        self.random = random.Random(seed)
        self.live: dict[int, list[int]] = {}  # Request.order -> tokens so far

    def start(self, request: Request) -> None:
        seen = self.live.get(request.order, [])
        assert request.output[: len(seen)] == seen  # it may have been preempted
        self.live[request.order] = list(request.output)

    def sync_context(self, rows: RunningRows, strategy: DraftStrategy) -> None:
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
        counts, tokens, depths, parents = [], [], [], []
        for row, length in enumerate(lengths.tolist()):
            request = rows.requests[row]
            done = int(rows.output_len[row])
            assert self.live[request.order] == rows.outputs[request.slot, :done].tolist()
            known = self.responses.get((request.prompt_id, request.sample_index), ([], []))[0]
            nodes = self._nodes(known[done:], length, strategy.topk if self.tree else 1)
            counts.append(len(nodes))
            for token, depth, parent in nodes:
                tokens.append(token)
                depths.append(depth)
                parents.append(parent)
        cumulative_acceptance = 0.7 ** np.asarray(depths, np.float32)
        made = [np.asarray(x, np.int32) for x in (counts, tokens, depths, parents)]
        return Draft(
            made[0],
            made[1],
            cumulative_acceptance.astype(np.float32),
            made[2],
            made[3] if self.tree else None,
        )

    def _nodes(self, truth: list[int], length: int, topk: int) -> list[tuple[int, int, int]]:
        rng = self.random
        trunk = []
        for depth in range(1, length + 1):
            right = truth[depth - 1] if depth <= len(truth) else rng.randrange(self.vocab)
            token = rng.randrange(self.vocab) if rng.random() < self.spoil else right
            trunk.append((token, depth, depth - 2))
        nodes = list(trunk)
        for _ in range(length * (topk - 1)):
            parent = rng.randrange(-1, len(nodes)) if nodes else -1
            depth = 1 if parent < 0 else nodes[parent][1] + 1
            taken = {n[0] for n in nodes if n[2] == parent}
            right = truth[depth - 1] if depth <= len(truth) else 0
            token = right if rng.random() < 0.5 else rng.randrange(self.vocab)
            if token not in taken and depth <= length:
                nodes.append((token, depth, parent))
        return nodes

    def observe(self, draft: Draft, reached: np.ndarray, accepted: np.ndarray) -> None:
        assert len(reached) == len(accepted) == draft.num_nodes
        assert not (accepted & ~reached).any()


class RandomSelector:
    """Any length, any width, any pruning, at random; sometimes plain decoding."""

    def __init__(self, kind: str, longest: int, topk: int, seed: int = 0):
        self.kind, self.longest, self.topk = kind, longest, topk
        self.random = random.Random(seed)
        self.emitted = self.rows = 0

    def select(self, num_running: int) -> DraftStrategy:
        if self.random.random() < 0.2:
            return NO_DRAFT
        length, topk = self.random.randint(1, self.longest), self.random.randint(1, self.topk)
        verified = self.random.choice((0, self.random.randint(2, length * topk + 1)))
        return DraftStrategy(self.kind, length, topk, verified)

    def record(self, measurement: StepMeasurement) -> None:
        assert measurement.num_emitted >= measurement.num_running
        assert (measurement.accepted <= measurement.reached).all()
        self.emitted += measurement.num_emitted
        self.rows += measurement.num_running

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def attach(engine: Engine, drafter, selector, eagle=None) -> Speculator:
    """Makes a plain engine speculate with these parts."""
    speculator = Speculator(
        drafter, selector, engine.scheduler.rows, engine.scheduler.reserve, engine.runner.tp, eagle
    )
    engine.speculator = speculator
    return speculator
