"""How fast a drafter learns: processor time of a micro-step by vocabulary, overlap (1 - TV) over seconds of training.

    python benchmarks/bench_drafter.py [--quick] [--out r.json] [--policy DIR --responses FILE.jsonl] [--seconds 3,8,15]

The online trainer with its default settings, from a layer of the policy, one thread; seconds are processor time of
training alone. Part `step`: random states of a Llama of H 576, both kinds, the vocabulary that is the default. Part
`learn`: the demo policy and traces that its responses look like; with `--policy`, that one and the rows {"prompt",
"response"} of `--responses`. A fifth of the responses is held out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.bench_record import ROOT, write_record
from lib.drafter_learning import train_to_marks, with_mean_weights
from torch import Tensor
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools"))

from demo_traces import generate

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.drafter.batching import DraftSequence
from megatron_tlt.drafter.kinds.registry import KINDS
from megatron_tlt.drafter.measure import measure
from megatron_tlt.drafter.online_trainer import OnlineDrafterTrainer
from megatron_tlt.drafter.pretrain import lookup_tables
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.drafters import DrafterModel
from megatron_tlt.models.loader import weight_reader
from megatron_tlt.types import HiddenStateSample, Trajectory

Rows = list[dict[str, Any]]
DEMO = ROOT / "assets" / "demo-policy"
VOCABULARIES = {"1k": 1024, "49k": 49152, "152k": 151936}
HELD_OUT = 5  # every so many responses


def fresh(kind: str, shape: ModelConfig) -> DrafterModel:
    """A drafter with random weights, of the default vocabulary."""
    model = KINDS[kind].build_model(KINDS[kind].fresh(SpeculationSection(drafter=kind), shape))
    model.initialise(0)
    return model


def trainer_of(
    model: DrafterModel, tables: tuple[Tensor, Tensor], samples: list[HiddenStateSample]
) -> OnlineDrafterTrainer:
    """The online trainer with its default settings but for the size of the buffer, which holds `samples`."""
    trainer = OnlineDrafterTrainer(model, DrafterSection(online={"buffer_mib": 4096.0}), fresh=True)
    trainer.begin_step(0, lambda: tables)
    for sample in samples:
        trainer.buffer.add(sample)
    trainer.merge(lambda _: None)  # chooses the vocabulary
    return trainer


def step_rows(count: int) -> Rows:
    """Medians of `count` micro-steps, the first two left out."""
    rows = []
    for name, vocab in VOCABULARIES.items():
        shape = ModelConfig("llama", vocab, 576, 30, 9, 3, 64, 1536, tie_word_embeddings=True)
        table, generator = torch.randn(vocab, 576) * 0.14, torch.Generator().manual_seed(0)
        for kind in KINDS:
            model = fresh(kind, shape)
            width = 576 * (len(model.config.aux_layers) + 1)
            samples = []
            for i in range(8):
                ids = torch.randint(0, min(vocab, model.config.draft_vocab_size), (96,), generator=generator).numpy()
                hidden = torch.randn(95, width, generator=generator)
                samples.append(HiddenStateSample(Trajectory(i, 0, ids, np.zeros(64, np.float32)), hidden))
            trainer, seconds = trainer_of(model, (table, table), samples), []
            for _ in range(count + 2):
                began = time.process_time()
                trainer.train_step()
                seconds.append(time.process_time() - began)
            rows.append({"part": "step", "vocabulary": name, "kind": kind, "seconds": statistics.median(seconds[2:])})
            print(f"step   V {name:5s} {kind:7s} {1000 * rows[-1]['seconds']:7.1f} ms of processor time", flush=True)
    return rows


def texts(policy: Path, responses: Path | None, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids of prompt and response."""
    tokenizer = HFTokenizer(policy)
    if responses is None:
        pairs = [(e.prompt, e.completion) for e in generate(count, seed=55)]
    else:
        lines = responses.read_text(encoding="utf-8").splitlines()[:count]
        pairs = [(row["prompt"], row["response"]) for row in map(json.loads, lines)]
    for prompt, response in pairs:
        yield list(tokenizer.encode_chat(prompt)), [*tokenizer.encode(response), tokenizer.eos_token_ids[0]]


@torch.no_grad()
def samples_of(policy: Path, responses: Path | None, layers: tuple[int, ...], count: int) -> list[HiddenStateSample]:
    """Responses with the hidden states that a drafter reads, from one forward of transformers each."""
    model, out = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval(), []
    for number, (prompt, response) in enumerate(texts(policy, responses, count)):
        ids = torch.tensor([prompt + response])
        states = model.model(ids, output_hidden_states=True).hidden_states
        hidden = torch.cat([*(states[i + 1][0] for i in layers), states[-1][0]], -1)[:-1].clone()
        trajectory = Trajectory(number, 0, ids[0].numpy(), np.zeros(len(response), np.float32))
        out.append(HiddenStateSample(trajectory, hidden))
    return out


def learn_rows(policy: Path, responses: Path | None, marks: list[float], count: int) -> Rows:
    """Overlap on held-out responses after so many seconds of training."""
    shape, rows = ModelConfig.from_hf(policy), []
    tables = lookup_tables(policy, shape, torch.device("cpu"))
    for kind in KINDS:
        model = fresh(kind, shape)
        samples = samples_of(policy, responses, model.config.aux_layers, count)
        held = [DraftSequence.of(s) for s in samples[::HELD_OUT]]
        model.start_from_policy(weight_reader(policy, shape))
        trainer = trainer_of(model, tables, [s for i, s in enumerate(samples) if i % HELD_OUT])
        for mark in train_to_marks(trainer, marks):
            drafting = with_mean_weights(fresh(kind, shape), trainer, model)
            found = measure(drafting, *tables, held, steps=3, temperature=1.0, batch_tokens=1024, window=1024).overlap
            rows.append({"part": "learn", "policy": policy.name, "kind": kind, "seconds": mark, "overlap": found})
            shown = " ".join(f"{x:.3f}" for x in found)
            steps = trainer.trained_steps
            print(f"learn  {policy.name} {kind:7s} {mark:5.0f} s, {steps} steps: 1-TV {shown}", flush=True)
    return rows


def summary_of(rows: Rows) -> dict[str, float]:
    """Milliseconds of a micro-step, and overlap of the first drafted token at the end."""
    out = {}
    for row in rows:
        if row["part"] == "step":
            out[f"ms_{row['kind']}_{row['vocabulary']}"] = 1000 * row["seconds"]
        else:
            out[f"overlap_{row['kind']}_{row['policy']}"] = row["overlap"][0]
    return out


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--policy", type=Path)
    parser.add_argument("--responses", type=Path)
    parser.add_argument("--seconds", default="3,8,15")
    parser.add_argument("--count", type=int, default=240, help="responses at most")
    args = parser.parse_args()
    torch.set_num_threads(1)
    marks = [1.0] if args.quick else [float(x) for x in args.seconds.split(",")]
    count = 40 if args.quick else args.count
    rows = step_rows(3 if args.quick else 9) + learn_rows(DEMO, None, marks, count)
    if args.policy is not None:
        rows += learn_rows(args.policy, args.responses, marks, count)
    write_record(args.out, rows, summary_of(rows))


if __name__ == "__main__":
    main()
