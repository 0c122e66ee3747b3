"""One rank: `drafter train` whole, stopped and gone on with in several places, and on the responses of the stopped one.

drafter_stops.py CONFIG FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from signal import SIGTERM

from megatron_tlt.cli.drafter import _train
from megatron_tlt.config.load import load_config
from megatron_tlt.config.root import Config
from megatron_tlt.distributed.world import World
from megatron_tlt.drafters.training.trainer import DrafterTrainer
from megatron_tlt.resilience.rollout_cache import ResponseWriter
from megatron_tlt.resilience.signals import StopSignals
from megatron_tlt.rollout import engine
from megatron_tlt.trainer import drafter_training

WHOLE_STEP, WHOLE_ADD = DrafterTrainer.step, ResponseWriter.add


def main(config_file: str, folder: Path) -> None:
    engine._REPORT_EVERY_S = 0.0  # a signal is seen at the next step: in 20 ms all responses may end
    world = World.start(load_config(config_file, [], Config).distributed, 1)

    def train(out: str, *overrides: str, response: int | None = None, step: int | None = None) -> int:
        """The exit code; a signal comes with that finished response, or within that optimizer step (from 0)."""
        signals, responses = StopSignals(), [0]

        def add(self: ResponseWriter, *args) -> None:
            responses[0] += 1
            if responses[0] == response:
                signals.note(SIGTERM)
            WHOLE_ADD(self, *args)

        def take_step(self: DrafterTrainer, batch, tables) -> dict[str, float]:
            if self.trained_steps == step:
                signals.note(SIGTERM)
            return WHOLE_STEP(self, batch, tables)

        ResponseWriter.add, DrafterTrainer.step = add, take_step
        config = load_config(config_file, list(overrides), Config)
        args = argparse.Namespace(action="train", drafter=None, out=folder / out, signals=signals)
        code = _train(config, world, args)
        print(f"{out}: {responses[0]} responses, exit code {code}", flush=True)
        return code

    assert train("whole") == 0
    at_once = "stop.save_s=19.9999999"  # of stop.term_s = 20: 0.1 us are left, so the next step is the last one
    assert train("stopped", at_once, response=3) == 75
    assert train("stopped", at_once, response=1) == 75
    assert train("stopped", step=3) == 75
    write_responses(folder / "stopped" / drafter_training.UNFINISHED, folder / "given.jsonl", config_file)
    assert train("stopped", step=6) == 75
    assert train("stopped") == 0
    assert train("given", f"drafter.responses_path={folder / 'given.jsonl'}") == 0
    world.close()


def write_responses(unfinished: Path, out: Path, config_file: str) -> None:
    """The cached responses to the training prompts, as a JSONL file."""
    config = load_config(config_file, [], Config)
    prompts = {p.prompt_id: p.token_ids for p in drafter_training.training_prompts(config)}
    samples = {}
    for file in sorted((unfinished / "rollout_cache" / "step-000001").glob("*.jsonl")):
        for line in file.read_text().splitlines()[1:]:
            sample = json.loads(line[9:])["sample"]
            samples[sample["prompt_id"], sample["sample_index"]] = sample["token_ids"]
    rows = [{"prompt_token_ids": prompts[at[0]], "token_ids": samples[at]} for at in sorted(samples)]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
