"""Two ranks of `bench_idle.py`'s interference part: rank 0 responses, rank 1 waits or trains. argv: CONFIG REPEATS."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from pathlib import Path

from bench_record import ROOT

sys.path.insert(0, str(ROOT))

import torch

from megatron_tlt.backends.build import build_backend
from megatron_tlt.backends.embedded import EmbeddedBackend
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.config.idle import IdleSection
from megatron_tlt.config.load import load_config
from megatron_tlt.config.root import Config
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.data.prompts import build_prompts
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.distributed.world import World
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.eagle.model import EagleModel
from megatron_tlt.drafters.training.online_trainer import OnlineDrafterTrainer
from megatron_tlt.idle.coordinator import IdleCoordinator
from megatron_tlt.idle.window import IdleWindow
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.trainer.models import push_policy
from megatron_tlt.trainer.sampling import sampling_params
from megatron_tlt.types import GenerateCall


def trainer_of(config: Config, backend: EmbeddedBackend) -> OnlineDrafterTrainer:
    """A trainer that reads the engine's tables."""
    shape = ModelConfig.from_hf(config.model.path)
    model = EagleModel(EagleConfig.of(shape))
    model.initialise(0)
    trainer = OnlineDrafterTrainer(model, config.drafter, fresh=True)
    trainer.begin_step(0, backend.lookup_tables)
    return trainer


def main() -> None:
    torch.set_num_threads(1)
    config = load_config(Path(sys.argv[1]), ["rollout.speculation.drafter=none"])
    world = World.start(DistributedSection())
    tokenizer = HFTokenizer(config.model.path)
    prompts = build_prompts(config.data, "train", tokenizer, 0).next_batch(16)
    params = sampling_params(config)
    backend = build_backend(EngineOptions(config.rollout, config.model, tokenizer=tokenizer, keep_layers=()))
    push_policy(config.model.path, backend)
    trainer = trainer_of(config, backend)
    backend.collect_hidden_states(trainer.buffer.add)
    backend.generate(GenerateCall(prompts, params, 8))  # both have something to train on, and are warm
    backend.collect_hidden_states(None)
    rows = []
    for turn in range(2 * int(sys.argv[2])):
        seconds = {}
        for kind in ("waiting", "training") if turn % 2 == 0 else ("training", "waiting"):
            with closing(IdleCoordinator(world.comm, world.new_counter())) as coordinator:
                section = IdleSection(train_drafter=kind == "training", min_tail_seconds=0.0)
                window = IdleWindow(coordinator, section, num_samples=trainer.num_samples)
                window.begin()
                started = time.perf_counter()
                if world.is_main:
                    backend.generate(GenerateCall(prompts, params, 8))
                    seconds[kind] = time.perf_counter() - started
                window.run(trainer.train_step if world.rank else lambda: None)
        if world.is_main:
            rows.append({f"{kind}_s": value for kind, value in seconds.items()})
    if world.is_main:
        print(json.dumps(rows))
    world.close()


if __name__ == "__main__":
    main()
