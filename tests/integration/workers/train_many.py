"""Trains several configurations in one world, one by one. argv: a JSON file of [[config, overrides], ...]."""

import json
import sys
from pathlib import Path

from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.config.load import load_config
from megatron_tlt.config.root import Config
from megatron_tlt.distributed.world import World
from megatron_tlt.trainer.setup import build_trainer


def body(world: World) -> None:
    for path, overrides in json.loads(Path(sys.argv[1]).read_text()):
        trainer = build_trainer(load_config(path, overrides, Config), world)
        trainer.run()
        if trainer.drafter.trainer is not None:
            assert trainer.backend.drafter_version == trainer.drafter.trainer.version, "the last one serves"
        trainer.close()
        world.barrier()


first, overrides = json.loads(Path(sys.argv[1]).read_text())[0]
sys.exit(run_on_every_rank(load_config(first, overrides, Config).distributed, 1, body))
