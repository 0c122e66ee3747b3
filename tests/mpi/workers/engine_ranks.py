"""Responses the same requests with the ranks as one sharded engine.

Rank 0 writes to argv[1]: {"tp": {"responses", "near_ties"}}, where responses are
{"prompt,sample": [tokens, logprobs]}; and on several ranks {kernels + " " + drafting: ...} of one engine that drafts
and collects hidden states, see `drafting`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.tensor_parallel import GroupTensorParallel
from megatron_tlt.distributed.world import World
from megatron_tlt.models.decoders.factory import build_decoder
from megatron_tlt.rollout.engine import Engine
from megatron_tlt.rollout.graph_capture import Captured, EagerCapturer, StaticStep
from megatron_tlt.rollout.graph_pool import GraphPool, PoolSizes
from megatron_tlt.rollout.hidden_states import HiddenStateCollector
from megatron_tlt.types import HiddenStateSample, SamplingParams
from tests.helpers.engines import Responses, generate_all, make_engine, random_jobs, small_config, speculating_engine
from tests.helpers.fake_decoder import FakeTurns, run_turns
from tests.helpers.tiny_models import random_weights, read_hidden_states

DRAFTING: dict[str, dict[str, Any]] = {
    "none": {"drafter": "none"},
    "adaptive": {"drafter": "suffix", "selector": "cost_model"},
    "suffix": {"drafter": "suffix", "selector": "fixed", "draft_len": 4},
    "eagle": {"drafter": "eagle", "selector": "fixed", "draft_len": 3},
    "bandit": {"drafter": "eagle", "selector": "beg_mab"},
}
CASES = [("native", name) for name in DRAFTING]
CASES += [("torch", "none"), ("torch", "suffix"), ("graphs", "suffix"), ("graphs", "eagle")]
CASES_OF_4 = [("native", name) for name in ("none", "suffix", "eagle")]  # whose sums have more than one order


def main() -> None:
    world = World.start(DistributedSection(), threads=1)
    everyone = GroupTensorParallel(dist.new_group(list(range(world.size))))
    config, jobs = small_config("qwen3"), random_jobs(131, 12, seed=9, longest=24)
    weights = random_weights(config)
    native = make_engine(config, weights, tp=everyone, num_blocks=9, budget=60)
    sharded = generate_all(native, jobs)
    assert native.take_stats().preemptions > 0
    assert all(other == sharded for other in world.all_gather_object(sharded)), "ranks diverged"
    counting = make_engine(config, weights, tp=everyone, count_near_ties=True)
    assert same_tokens(generate_all(counting, jobs), sharded), "preemption shows"
    ties = counting.runner.sampler.near_ties
    results: dict[str, Any] = {"tp": {"responses": encode(sharded), "near_ties": ties}}
    if world.size == 2:
        results["turns"] = turns(world, everyone)
        results["pre_rollouts"] = pre_rollouts(world, everyone)
    cases = {1: [], 2: CASES, 4: CASES_OF_4}[world.size]
    results |= {f"{kernels} {name}": drafting(world, everyone, kernels, name) for kernels, name in cases}
    if world.is_main:
        Path(sys.argv[1]).write_text(json.dumps(results))
    world.close()


def drafting(world: World, tp: GroupTensorParallel, kernels: str, name: str) -> dict[str, Any]:
    """One case: responses, whether all ranks agree, and the hidden states' largest difference to one pass over the
    responses by the same decoder and by one that is not sharded.
    """
    config, jobs = small_config("qwen3"), random_jobs(131, 8, seed=8)
    weights, samples = random_weights(config), list[HiddenStateSample]()
    has_graphs = kernels == "graphs"
    kernels = "torch" if has_graphs else kernels
    engine = speculating_engine(config, weights, kernels, speculation=DRAFTING[name], tp=tp, num_blocks=10)
    pool = use_graphs(engine, world.rank) if has_graphs else None
    engine.collect_hidden_states(HiddenStateCollector(samples.append))
    responses = generate_all(engine, jobs)
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert len(samples) == sum(len(tokens) > 1 for tokens, _ in responses.values())
    mine = responses, [(repr(c.trajectory), c.hidden.tolist()) for c in samples]
    whole = build_decoder(config, "cpu", torch.float32, kernels, 1, None)
    whole.load_weights(weights)
    texts = [c.trajectory.token_ids.tolist() for c in samples]

    def difference(decoder: Any) -> float:
        passed = read_hidden_states(decoder, texts, 16, 512)
        return max(float((c.hidden - want[:-1]).abs().max()) for c, want in zip(samples, passed, strict=True))

    if pool is not None:
        assert pool.graphs.stats.eager > 0 < pool.graphs.stats.refused and pool.graphs.stats.replays > 0
        assert len({str(keys) for keys in world.all_gather_object(pool.graphs.keys)}) == 1, "captures differ"
    stats = engine.take_stats()
    return {
        "responses": encode(responses),
        "accept_length": stats.speculation.accept_length,
        "preemptions": stats.preemptions,
        "ranks_agree": all(other == mine for other in world.all_gather_object(mine)),
        "off_plain_pass": difference(engine.runner.decoder),
        "off_one_rank": difference(whole),
    }


def pre_rollouts(world: World, tp: GroupTensorParallel) -> dict[str, Any]:
    """Responses with earlier ones as drafts: right, cut and spoiled ones, by several drafters; and how many of their
    tokens were accepted.
    """
    config, jobs = small_config("qwen3"), random_jobs(131, 8, seed=8)
    weights, found, accepted = random_weights(config), list[Responses](), list[int]()
    for name in ("none", "adaptive", "suffix", "eagle"):
        speculation = DRAFTING[name] | ({"selector": "fixed"} if name == "none" else {})
        engine = speculating_engine(config, weights, speculation=speculation, tp=tp, num_blocks=10)
        assert engine.speculator is not None
        drafts = dict[tuple[int, int], np.ndarray]()
        for spoiled in (131, 131, 9, 2):
            engine.speculator.begin(drafts)
            found.append(generate_all(engine, jobs))
            engine.speculator.end_generate()
            right = {key: np.array(tokens, np.int32) for key, (tokens, _) in found[0].items()}
            drafts = {key: np.where(np.arange(len(t)) % spoiled == 1, 7, t) for key, t in right.items()}
        accepted.append(engine.take_stats().speculation.pre_rolled_accepted)
    return {
        "equal": all(responses == found[0] for responses in found),
        "ranks_agree": all(other == (found, accepted) for other in world.all_gather_object((found, accepted))),
        "accepted": accepted,
    }


def turns(world: World, tp: GroupTensorParallel) -> dict[str, Any]:
    """Trajectories by drafter, of environments that answer late and only on the first rank; other ranks work with it
    while all requests wait.
    """
    config, weights, work = small_config("qwen3"), random_weights(small_config("qwen3")), list[float]()
    params = SamplingParams(max_tokens=70, max_turn_tokens=12, seed=17)
    jobs = [(i, list(range(1 + i, 9 + 3 * i)), params, 3) for i in range(5)]

    def together(seconds: float) -> bool:
        work.append(seconds)
        return bool(tp.largest(int(tp.rank == 0 and len(work) % 3 > 0)))

    found = {}
    for name in ("none", "suffix", "eagle"):
        engine = speculating_engine(config, weights, "native", speculation=DRAFTING[name], tp=tp, num_blocks=12)
        source = FakeTurns(131, delay=Random(7 * len(name) + world.rank))
        found[name] = run_turns(engine, jobs, source, together)
        assert bool(source.seen) == (world.rank == 0), "other ranks' environments are not used"
        assert engine.take_stats().preemptions > 0
    lengths = world.all_gather_object(len(work))
    return {
        "equal": found["none"] == found["suffix"] == found["eagle"],
        "ranks_agree": all(other == found for other in world.all_gather_object(found)),
        "worked": lengths[0] if len(set(lengths)) == 1 else 0,
        "turns": max(len(rewards) for _, _, _, rewards, *_ in found["none"].values()),
    }


class UnevenCapturer(EagerCapturer):
    """Steps as they are, whose sizes differ by rank, as those of a real allocator do."""

    def __init__(self, rank: int):
        self.pool_bytes, self._rank, self._count = 0, rank, 0

    def warm_up(self, step: StaticStep) -> int:
        step()
        self._count += 1
        return 150 * (self._count % 5) + 70 * self._rank * (self._count % 3)

    def capture(self, step: StaticStep) -> Captured:
        self.pool_bytes = max(self.pool_bytes, 200)
        return Captured(step, 100 + 60 * self._rank)


def use_graphs(engine: Engine, rank: int) -> GraphPool:
    """Decoding steps of `engine` run through a pool with room for few graphs."""
    runner, sizes = engine.runner, PoolSizes(16, 256, 16, 128)
    decoder = runner.decoder
    probe = GraphPool(decoder, runner.kv, sizes, capturer=UnevenCapturer(0))
    budget = probe.graphs.memory_bytes + 2000
    pool = runner.pool = GraphPool(decoder, runner.kv, sizes, budget, UnevenCapturer(rank))
    if engine.speculator is not None and engine.speculator.trained is not None:
        engine.speculator.trained.decoder.use_graphs(pool.graphs.run)
    engine.capture_graphs(4)
    return pool


def encode(responses: Responses) -> dict[str, Any]:
    return {f"{p},{i}": responses[p, i] for p, i in sorted(responses)}


def same_tokens(a: Responses, b: Responses) -> bool:
    return {k: v[0] for k, v in a.items()} == {k: v[0] for k, v in b.items()}


main()
