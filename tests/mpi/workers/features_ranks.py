"""One engine sharded over the ranks hands on the hidden states of its answers, plainly and speculating.

Rank 0 writes {case: {"chunks": count, "preemptions": count, "ranks_agree": whether all ranks emitted the same,
"off_plain_pass", "off_one_rank": largest difference to one pass of the same decoder, of one that is not sharded}} to
argv[1].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.tensor_parallel import GroupTensorParallel
from megatron_tlt.distributed.world import World
from megatron_tlt.drafter.eagle3.hidden_states import read_hidden_states
from megatron_tlt.models.factory import build_decoder
from megatron_tlt.rollout.hidden_states import HiddenStateCollector
from megatron_tlt.types import HiddenStateSample
from tests.helpers.engines import answer_all, random_jobs, small_config
from tests.helpers.speculating import speculating_engine
from tests.helpers.tiny_models import random_weights

PLAIN = {"drafter": "none"}
CHAIN = {"drafter": "eagle", "selector": "fixed", "draft_len": 3}
TREE = {"drafter": "suffix", "selector": "fixed", "draft_len": 4, "topk": 2}
CASES = {
    "native plain": PLAIN,
    "native chain": CHAIN,
    "native tree": TREE,
    "torch plain": PLAIN,
    "torch tree": TREE,
}


def main() -> None:
    world = World.start(DistributedSection(), threads=1)
    everyone = GroupTensorParallel(dist.new_group(list(range(world.size))))
    config, jobs = small_config("qwen3"), random_jobs(131, 8, seed=8)
    weights, results = random_weights(config), {}
    for name, speculation in CASES.items():
        kernels = name.split()[0]
        engine = speculating_engine(config, weights, kernels, tp=everyone, num_blocks=10, **speculation)
        chunks: list[HiddenStateSample] = []
        engine.collect_hidden_states(HiddenStateCollector(chunks.append))
        answers = answer_all(engine, jobs)
        assert engine.blocks.num_used == 0
        assert len(chunks) == sum(len(tokens) > 1 for tokens, _ in answers.values())
        mine = [(c.prompt_id, c.sample_index, c.token_ids.tolist(), c.hidden.tolist()) for c in chunks]
        everybody = world.all_gather_object(mine)
        whole = build_decoder(config, "cpu", torch.float32, kernels, 1, None)
        whole.load_weights(weights)
        results[name] = {
            "chunks": len(chunks),
            "preemptions": engine.take_stats().preemptions,
            "ranks_agree": all(other == mine for other in everybody),
            "off_plain_pass": largest_difference(chunks, engine.runner.decoder),
            "off_one_rank": largest_difference(chunks, whole),
        }
    if world.is_main:
        Path(sys.argv[1]).write_text(json.dumps(results))
    world.close()


def largest_difference(chunks: list[HiddenStateSample], decoder) -> float:
    texts = [c.token_ids.tolist() for c in chunks]
    passed = read_hidden_states(decoder, texts, 16, 512)
    return max(float((c.hidden - want[:-1]).abs().max()) for c, want in zip(chunks, passed, strict=True))


main()
