"""Answers the same requests with the prompts split over the ranks, and with the ranks as one sharded engine.

Rank 0 writes {case: {"answers": {"prompt,sample": [tokens, logprobs]}, "near_ties": count}} to argv[1].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.tensor_parallel import GroupTensorParallel
from megatron_tlt.distributed.world import World
from tests.helpers.engines import Answers, answer_all, make_engine, random_jobs, small_config
from tests.helpers.tiny_models import random_weights


def main() -> None:
    world = World.start(DistributedSection(), threads=1)
    everyone = GroupTensorParallel(dist.new_group(list(range(world.size))))
    results = {}
    for family in ("qwen2", "qwen3", "llama"):
        config, jobs = small_config(family), random_jobs(131, 12, seed=9, longest=24)
        weights = random_weights(config)

        mine = [job for job in jobs if job[0] % world.size == world.rank]
        split: Answers = {}
        for part in world.all_gather_object(answer_all(make_engine(config, weights, max_running=8), mine)):
            split |= part
        results[f"{family}/split"] = encode(split, 0)

        if config.num_heads % world.size == 0 and (world.size < 4 or family == "qwen3"):
            native = make_engine(config, weights, tp=everyone, num_blocks=9, budget=60)
            sharded = answer_all(native, jobs)
            assert native.take_stats().preemptions > 0
            assert len({json.dumps(encode(a, 0)) for a in world.all_gather_object(sharded)}) == 1, (
                "ranks diverged"
            )
            counting = make_engine(config, weights, tp=everyone, count_near_ties=True)
            assert same_tokens(answer_all(counting, jobs), sharded), "preemption shows"
            results[f"{family}/tp"] = encode(sharded, counting.take_stats().near_ties)
    if world.is_main:
        Path(sys.argv[1]).write_text(json.dumps(results))
    world.close()


def encode(answers: Answers, near_ties: int) -> dict:
    return {"answers": {f"{p},{i}": answers[p, i] for p, i in sorted(answers)}, "near_ties": near_ties}


def same_tokens(a: Answers, b: Answers) -> bool:
    return {k: v[0] for k, v in a.items()} == {k: v[0] for k, v in b.items()}


main()
