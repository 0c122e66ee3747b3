"""One engine sharded over the ranks answers plainly and with each drafter.

Rank 0 writes {case: {"answers": ..., "near_ties": count, "accept_length": mean}} to argv[1].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.tensor_parallel import GroupTensorParallel
from megatron_tlt.distributed.world import World
from tests.helpers.engines import Answers, answer_all, random_jobs, small_config
from tests.helpers.speculating import speculating_engine
from tests.helpers.tiny_models import random_weights

CASES = {
    "none": {"drafter": "none"},
    "suffix": {"drafter": "suffix", "selector": "cost_model"},
    "eagle": {"drafter": "eagle", "selector": "fixed", "draft_len": 3},
    "eagle_tree": {"drafter": "eagle", "selector": "fixed", "draft_len": 3, "topk": 2},
    "hybrid": {"drafter": "hybrid", "selector": "beg_mab"},
}


def main() -> None:
    world = World.start(DistributedSection(), threads=1)
    everyone = GroupTensorParallel(dist.new_group(list(range(world.size))))
    results = {}
    config, jobs = small_config("qwen3"), random_jobs(131, 6, seed=9, longest=24)
    weights = random_weights(config)
    for name, speculation in CASES.items():
        engine = speculating_engine(config, weights, tp=everyone, num_blocks=12, **speculation)
        answers = answer_all(engine, jobs)
        assert engine.blocks.num_used == 0
        everybody = world.all_gather_object(answers)
        assert all(other == answers for other in everybody), f"{name}: ranks diverged"
        results[name] = {
            "answers": encode(answers),
            "accept_length": engine.take_stats().speculation.accept_length,
        }
    if world.is_main:
        Path(sys.argv[1]).write_text(json.dumps(results))
    world.close()


def encode(answers: Answers) -> dict:
    return {f"{p},{i}": answers[p, i] for p, i in sorted(answers)}


main()
