"""One of two ranks of a vLLM engine: its responses are the embedded engine's, the same on both ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from megatron_tlt.backends.build import build_backend
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.backends.vllm.build import build_backend as build_vllm
from megatron_tlt.config.rollout import RolloutSection, SyncSection
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.distributed.world import World
from megatron_tlt.drafters.checkpoint import load_drafter
from megatron_tlt.trainer.models import push_policy
from megatron_tlt.trainer.setup import tensor_parallel
from megatron_tlt.types import GenerateCall, HiddenStateSample, Prompt, SamplingParams, WeightBucket
from tests.helpers.fake_decoder import FakeTurns
from tests.helpers.vllm_engines import ANY_LENGTH, DRAFTER, MODEL, RUNNING, SHAPE, demo_prompts, demo_weights


def main() -> None:
    world = World.start(DistributedSection(device="cpu"), threads=1)
    tp = tensor_parallel(world, 2)
    tokenizer = HFTokenizer(MODEL.path)
    prompts = demo_prompts(tokenizer)
    shared = {"max_running_requests": RUNNING, "speculation": ANY_LENGTH}
    rollout = RolloutSection.model_validate({"backend": "vllm", "tp": 2, **shared})
    engine = build_vllm(
        EngineOptions(
            rollout,
            MODEL,
            SyncSection(verify=True),
            tokenizer=tokenizer,
            tp=tp,
            drafter=load_drafter(DRAFTER, SHAPE),
            keep_layers=(),
        )
    )
    engine.begin_update(0)
    engine.update_weights(WeightBucket(0, list(demo_weights(None).items())))
    engine.finish_update()
    states: list[HiddenStateSample] = []
    engine.collect_hidden_states(states.append)

    def fetched() -> Iterator[Prompt]:
        """As `data.prompt_queue`: the ranks agree on each prompt."""
        for prompt in prompts:
            assert tp.largest(1000 + prompt.prompt_id) == 1000 + prompt.prompt_id
            yield prompt

    def progress(running: int, waiting: int, tokens: int) -> None:
        """As `resilience.shutdown`: a collective at every call."""
        assert tp.largest(running) == running
        if tokens > stop_at:
            raise KeyboardInterrupt

    params, stop_at = SamplingParams(max_tokens=80, temperature=0.9, top_k=30, seed=5), 1 << 30
    mine = engine.generate(GenerateCall(fetched(), params, 4, progress))
    assert len({repr(s) for s in world.all_gather_object(mine)}) == 1
    assert len(states) == len(mine) == 16
    assert engine.take_stats().speculation.accept_length > 1.5
    if world.is_main:
        ours = build_backend(EngineOptions(RolloutSection(), MODEL, tokenizer=tokenizer))
        push_policy(MODEL.path, ours)
        expected = ours.generate(GenerateCall(prompts, params, 4))
        assert [s.token_ids for s in mine] == [s.token_ids for s in expected]
    of_turns = replace(params, max_turn_tokens=20)
    source = FakeTurns(SHAPE.vocab_size, random.Random(0), most_turns=3)
    mine_too = engine.generate(GenerateCall(fetched(), of_turns, 4, progress, turns=source))
    assert len({repr(s) for s in world.all_gather_object(mine_too)}) == 1 and any(s.given for s in mine_too)
    if world.is_main:
        expected = ours.generate(GenerateCall(prompts, of_turns, 4, turns=FakeTurns(SHAPE.vocab_size, most_turns=3)))
        assert [s.token_ids for s in mine_too] == [s.token_ids for s in expected]
    stop_at = 50
    try:
        engine.generate(GenerateCall(fetched(), params, 4, progress))
    except KeyboardInterrupt:
        print("interrupted")
    stop_at = 1 << 30
    again = engine.generate(GenerateCall(fetched(), params, 4, progress))
    assert [s.token_ids for s in again] == [s.token_ids for s in mine], "the ranks go on together"
    engine.close()
    print("equal on both ranks")
    world.close()


if __name__ == "__main__":
    main()
